"""How much of this machine others than the replicas keep busy: router, door, callers, and whatever else runs here."""

import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from trimtab_pipelines.shared_machine import Machine

SAMPLE_INTERVAL_SECONDS = 2.0
WINDOW_SECONDS = 10.0
"""The same seconds as those whose requests are planned from."""


def busy_seconds() -> tuple[float, int]:
    """What the processors that this process may use have computed so far, in seconds, and how many they are."""
    each = psutil.cpu_times(percpu=True)
    ours = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(len(each))
    times = [each[number] for number in ours if number < len(each)]
    return sum(sum(one) - one.idle - getattr(one, "iowait", 0.0) - _in_guests(one) for one in times), len(times)


def _in_guests(times: object) -> float:
    """What is told once more by itself."""
    return float(getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0))


@dataclass(frozen=True, slots=True)
class _Look:
    at: float
    others_seconds: float


class OtherCpuUsage:
    """Follows what others compute, from one look to the next."""

    def __init__(self) -> None:
        self._looks: deque[_Look] = deque()
        self._replicas: Mapping[str, float] = {}
        self._gone = 0.0

    def is_due(self, now: float) -> bool:
        """Whether it is time to look again."""
        return not self._looks or now >= self._looks[-1].at + SAMPLE_INTERVAL_SECONDS

    def sample(self, now: float, busy: tuple[float, int], replicas: Mapping[str, float]) -> Machine | None:
        """What others used in the last seconds; None at the first look.

        Args:
            now: monotonic seconds.
            busy: as `busy_seconds` tells it.
            replicas: what each that is there has computed so far, in seconds; 0 of one that has just ended.
        """
        self._gone += sum(used for name, used in self._replicas.items() if name not in replicas)
        self._replicas = {name: max(used, self._replicas.get(name, 0.0)) for name, used in replicas.items()}
        others_seconds = busy[0] - self._gone - sum(self._replicas.values())
        while self._looks and self._looks[0].at < now - WINDOW_SECONDS:
            self._looks.popleft()
        self._looks.append(_Look(now, others_seconds))
        first, last, cores = self._looks[0], self._looks[-1], float(busy[1])
        if not last.at > first.at:
            return None
        others = (last.others_seconds - first.others_seconds) / (last.at - first.at)
        return Machine(cores=cores, other_cores=round(min(max(others, 0.0), cores), 2))
