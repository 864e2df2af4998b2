"""Phases of the served run: constant load under one plan, for calibration and for comparison."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulator.machine import Floats, MachineRecord

BEFORE, AFTER = {"locate": "locate-xl", "read": "read-xl"}, {"locate": "locate-l", "read": "read-l"}
Figures = Mapping[str, Mapping[str, float]]
"""By phase: p50 and p99 in seconds, the share of requests without a response, the number of requests."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A constant load under one plan, as a share of the first plan's capacity."""

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
    Phase("50% of capacity", 0.5, 30, BEFORE),  # queues correlate, so its p99 needs the most requests
    # The p99 of these two is then one of the first plan's latencies, the median one of the second plan's.
    Phase("change of plan", 0.4, 10, BEFORE),
    Phase("change of plan", 0.4, 20, AFTER),
    Phase("other plan", 0.3, 15, AFTER),
)
COMPARED = tuple(dict.fromkeys(phase.name for phase in CYCLE if phase.name not in CALIBRATING))
MAX_TAKEN_SHARE = 0.05
"""Share of a phase that the host or other processes may use. A phase with more is not compared, because readings are
too coarse to show which batches it slowed."""
MIN_KEPT_SHARE = 0.6
"""Share of the seconds of each kind of phase that must remain."""
_EXCLUDED = ""


@dataclass(frozen=True, slots=True)
class PhaseSequence:
    """The phases of a run in order; excluded ones enter no figure."""

    phases: tuple[Phase, ...]
    excluded: frozenset[int] = frozenset()

    @property
    def ends(self) -> NDArray[np.int64]:
        return np.cumsum([phase.seconds for phase in self.phases])

    def without_disturbed(self, machine: MachineRecord) -> "PhaseSequence":
        """Exclude the phases in which the host or other processes took too much."""
        starts = [0, *self.ends[:-1].tolist()]
        shares = (
            machine.taken(at, at + phase.seconds) / phase.seconds for at, phase in zip(starts, self.phases, strict=True)
        )
        return replace(self, excluded=frozenset(n for n, share in enumerate(shares) if share > MAX_TAKEN_SHARE))

    @property
    def is_sufficient(self) -> bool:
        """Whether enough seconds of each kind of phase remain."""
        total, kept = Counter[str](), Counter[str]()
        for n, phase in enumerate(self.phases):
            total[phase.name] += phase.seconds
            kept[phase.name] += 0 if n in self.excluded else phase.seconds
        return all(kept[name] >= MIN_KEPT_SHARE * seconds for name, seconds in total.items())

    def load(self, capacity_rps: float) -> str:
        """The load in the load tester's notation."""
        return "steps:" + ",".join(f"{phase.share * capacity_rps:.4g}x{phase.seconds}" for phase in self.phases)

    def changes(self) -> list[tuple[float, Mapping[str, str]]]:
        """Second and variants of each change of plan."""
        starts = (float(end) for end in self.ends[:-1])
        pairs = zip(self.phases, self.phases[1:], starts, strict=False)
        return [(at, phase.variants) for before, phase, at in pairs if phase.variants is not before.variants]

    def names(self, scheduled: Floats) -> NDArray[np.str_]:
        """Name of the phase in which each request was due; empty if it is excluded."""
        index = np.minimum(np.searchsorted(self.ends, scheduled, side="right"), len(self.phases) - 1)
        names = [_EXCLUDED if n in self.excluded else phase.name for n, phase in enumerate(self.phases)]
        return np.array(names)[index]

    def figures(self, scheduled: Floats, latency: Floats, answered: NDArray[np.bool_]) -> Figures:
        names = self.names(scheduled)
        kinds = [name for name in dict.fromkeys(names.tolist()) if name != _EXCLUDED]
        return {name: _phase_figures(latency, answered, names == name) for name in kinds}


def _phase_figures(latency: Floats, answered: NDArray[np.bool_], selected: NDArray[np.bool_]) -> dict[str, float]:
    p50, p99 = np.quantile(latency[selected & answered], (0.5, 0.99))
    return {
        "p50": float(p50),
        "p99": float(p99),
        "dropped": 1.0 - float(answered[selected].mean()),
        "requests": selected.sum(),
    }
