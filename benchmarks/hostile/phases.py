"""Results of the friendly clients, split into calm and hostile phases."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

CALM = ""
FRIENDLY_RPS = 20.0
"""Requests a second that friendly callers send, whatever is outstanding."""


class Sample(NamedTuple):
    """One friendly request or probe: when it was sent, how long it took, and its end.

    `stolen_seconds` is what the machine took: our own loop stood still, or the router waited for a core. `busy_seconds`
    is how long the router's loop ran meanwhile; one that stops does so because it is busy. `all_waited_seconds` is how
    long all threads of all processes on the way waited for a core, one after the other or at once.
    """

    wire: str
    at: float
    seconds: float
    stolen_seconds: float
    busy_seconds: float
    code: str
    all_waited_seconds: float = 0.0

    @property
    def own_seconds(self) -> float:
        """What is left for the router and whoever stands before it."""
        return self.seconds - self.stolen_seconds

    @property
    def stop_seconds(self) -> float:
        """How long the router's loop stood still for this probe."""
        return min(self.own_seconds, self.busy_seconds)

    def spoilt_by_the_machine(self, slo_seconds: float) -> bool:
        """Whether a router not busy would have answered well in time, had the machine not taken so much of it."""
        refused = self.code != "ok" and not self.code.startswith("wrong")
        stolen = min(max(self.stolen_seconds, self.all_waited_seconds), self.seconds)
        return refused and max(self.seconds - stolen, self.busy_seconds) < slo_seconds / 2 <= stolen


class Phase(NamedTuple):
    """A stretch of time, in monotonic seconds, and the hostile kind that acted in it (`CALM` for none)."""

    kind: str
    began: float
    ended: float


@dataclass(slots=True)
class Seen:
    """What friendly callers and probes saw in the phases of one kind."""

    codes: Counter[str] = field(default_factory=Counter)
    good_seconds: list[float] = field(default_factory=list)
    longest_stop_seconds: float = 0.0
    left_to_the_machine: int = 0

    def add(self, sample: Sample, slo_seconds: float) -> None:
        """Count one."""
        if sample.wire == "probe":
            self.longest_stop_seconds = max(self.longest_stop_seconds, sample.stop_seconds)
            return
        if sample.spoilt_by_the_machine(slo_seconds):
            self.left_to_the_machine += 1
            return
        self.codes[sample.code] += 1
        if sample.code == "ok":
            self.good_seconds.append(sample.own_seconds)

    @property
    def sent(self) -> int:
        """Friendly requests."""
        return self.codes.total()

    @property
    def asked(self) -> int:
        """Friendly requests, those too that the machine spoilt."""
        return self.sent + self.left_to_the_machine

    @property
    def not_ok(self) -> int:
        """Those that were not answered rightly."""
        return self.sent - self.codes["ok"]

    def quantile_seconds(self, quantile: float) -> float:
        """A quantile of the good answers' latency."""
        ordered = sorted(self.good_seconds)
        return ordered[min(int(quantile * len(ordered)), len(ordered) - 1)] if ordered else float("inf")


def read(log: Path) -> list[Sample]:
    """Read what the friendly process wrote; a line cut short by its end is left out."""
    lines = log.read_text(encoding="ascii").splitlines(keepends=True)
    return [Sample(**json.loads(line)) for line in lines if line.endswith("\n")]


def by_kind(samples: Iterable[Sample], phases: Sequence[Phase], slo_seconds: float) -> dict[str, Seen]:
    """Split by phase; what was sent in none is left out."""
    seen = {phase.kind: Seen() for phase in phases}
    for sample in samples:
        phase = next((p for p in phases if p.began <= sample.at < p.ended), None)
        if phase is not None:
            seen[phase.kind].add(sample, slo_seconds)
    return seen


def together(all_seen: Iterable[Seen]) -> Seen:
    """Add up."""
    total = Seen()
    for seen in all_seen:
        total.codes += seen.codes
        total.good_seconds += seen.good_seconds
        total.longest_stop_seconds = max(total.longest_stop_seconds, seen.longest_stop_seconds)
        total.left_to_the_machine += seen.left_to_the_machine
    return total
