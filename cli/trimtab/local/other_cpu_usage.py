"""CPU usage of all processes on this machine except the replicas: router, Envoy, clients and others."""

import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from trimtab_pipelines.shared_capacity import Machine

SAMPLE_INTERVAL_SECONDS = 2.0
WINDOW_SECONDS = 10.0
"""Equal to the window of the arrival rate that plans are made for."""


def busy_seconds() -> tuple[float, int]:
    """CPU seconds used so far on the processors available to this process, and the number of these."""
    times = psutil.cpu_times(percpu=True)
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(len(times))
    own = [times[number] for number in available if number < len(times)]
    return sum(sum(cpu) - cpu.idle - getattr(cpu, "iowait", 0.0) - _guest_seconds(cpu) for cpu in own), len(own)


def _guest_seconds(times: object) -> float:
    """CPU seconds of guests, which the kernel also counts as user time."""
    return float(getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0))


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    other_seconds: float


class OtherCpuUsage:
    """Moving average of the CPU usage of other processes."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._replicas: Mapping[str, float] = {}
        self._ended_replicas_seconds = 0.0

    def is_due(self, now: float) -> bool:
        return not self._samples or now >= self._samples[-1].at + SAMPLE_INTERVAL_SECONDS

    def sample(self, now: float, busy: tuple[float, int], replicas: Mapping[str, float]) -> Machine | None:
        """Return the usage over the last seconds; None at the first sample.

        Args:
            now: monotonic seconds.
            busy: value of `busy_seconds`.
            replicas: CPU seconds used so far by each existing replica; 0 for one that has just ended.
        """
        self._ended_replicas_seconds += sum(used for name, used in self._replicas.items() if name not in replicas)
        self._replicas = {name: max(used, self._replicas.get(name, 0.0)) for name, used in replicas.items()}
        other_seconds = busy[0] - self._ended_replicas_seconds - sum(self._replicas.values())
        while self._samples and self._samples[0].at < now - WINDOW_SECONDS:
            self._samples.popleft()
        self._samples.append(_Sample(now, other_seconds))
        first, last, cores = self._samples[0], self._samples[-1], float(busy[1])
        if not last.at > first.at:
            return None
        used = (last.other_seconds - first.other_seconds) / (last.at - first.at)
        return Machine(cores=cores, other_cores=round(min(max(used, 0.0), cores), 2))
