"""Served run: phases of constant load under one plan, for calibration and for comparison by turns."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulator.pace import Floats, Pace

BEFORE, AFTER = {"locate": "locate-xl", "read": "read-xl"}, {"locate": "locate-l", "read": "read-l"}
Figures = Mapping[str, Mapping[str, float]]
"""By phase: p50 and p99 in seconds, the share without an answer, the number of requests."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A constant load under one plan; a share of what the first plan's scarcest stage carries."""

    name: str
    share: float
    seconds: int
    variants: Mapping[str, str]


CALIBRATING = ("light", "heavy", "other plan")
CYCLE = (
    Phase("light", 0.12, 15, BEFORE),
    Phase("20% of capacity", 0.2, 20, BEFORE),
    Phase("35% of capacity", 0.35, 20, BEFORE),
    Phase("heavy", 0.45, 15, BEFORE),
    Phase("50% of capacity", 0.5, 30, BEFORE),  # queues follow each other there, so its p99 needs the most requests
    # The p99 of these two is then one of the first plan's latencies, the median one of the second plan's.
    Phase("change of plan", 0.4, 10, BEFORE),
    Phase("change of plan", 0.4, 20, AFTER),
    Phase("other plan", 0.3, 15, AFTER),
)
COMPARED = tuple(dict.fromkeys(phase.name for phase in CYCLE if phase.name not in CALIBRATING))
MOST_AWAY = 0.05
"""Share of a phase for which the host or other processes may have had the processors. A phase of more is not compared:
its answers tell of them, and readings and ticks say too little of who was in the middle of what when they came."""
LEAST_LEFT = 0.6  # of the seconds of each kind of phase
_LEFT_OUT = ""


@dataclass(frozen=True, slots=True)
class Course:
    """The phases of a run, one after the other; some may be left out of all that is made of it."""

    phases: tuple[Phase, ...]
    left_out: frozenset[int] = frozenset()

    @property
    def ends(self) -> NDArray[np.int64]:
        """Second at which each ends."""
        return np.cumsum([phase.seconds for phase in self.phases])

    def calm(self, pace: Pace) -> "Course":
        """The course without the phases in which the processors were away for too long."""
        starts = [0, *self.ends[:-1].tolist()]
        away = (
            pace.away(at, at + phase.seconds) / phase.seconds for at, phase in zip(starts, self.phases, strict=True)
        )
        return replace(self, left_out=frozenset(n for n, share in enumerate(away) if share > MOST_AWAY))

    @property
    def is_enough(self) -> bool:
        """Whether enough of each kind of phase is left."""
        whole, left = Counter[str](), Counter[str]()
        for n, phase in enumerate(self.phases):
            whole[phase.name] += phase.seconds
            left[phase.name] += 0 if n in self.left_out else phase.seconds
        return all(left[name] >= LEAST_LEFT * seconds for name, seconds in whole.items())

    def load(self, capacity_rps: float) -> str:
        """The load as the load tester reads it."""
        return "steps:" + ",".join(f"{phase.share * capacity_rps:.4g}x{phase.seconds}" for phase in self.phases)

    def changes(self) -> list[tuple[float, Mapping[str, str]]]:
        """At which second which variants take over."""
        starts = (float(end) for end in self.ends[:-1])
        pairs = zip(self.phases, self.phases[1:], starts, strict=False)
        return [(at, phase.variants) for before, phase, at in pairs if phase.variants is not before.variants]

    def names(self, scheduled: Floats) -> NDArray[np.str_]:
        """The name of the phase in which each request was due; nothing where it is left out."""
        which = np.minimum(np.searchsorted(self.ends, scheduled, side="right"), len(self.phases) - 1)
        names = [_LEFT_OUT if n in self.left_out else phase.name for n, phase in enumerate(self.phases)]
        return np.array(names)[which]

    def figures(self, scheduled: Floats, latency: Floats, answered: NDArray[np.bool_]) -> Figures:
        """Sum up the requests of each phase, by when they were due."""
        names = self.names(scheduled)
        kinds = [name for name in dict.fromkeys(names.tolist()) if name != _LEFT_OUT]
        return {name: _summed_up(latency, answered, names == name) for name in kinds}


def _summed_up(latency: Floats, answered: NDArray[np.bool_], here: NDArray[np.bool_]) -> dict[str, float]:
    p50, p99 = np.quantile(latency[here & answered], (0.5, 0.99))
    return {"p50": float(p50), "p99": float(p99), "dropped": 1.0 - float(answered[here].mean()), "requests": here.sum()}
