"""What a simulation gave: one entry a request, one a second, and every plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.request_outcome import LATE, OK, RequestOutcome


@dataclass(frozen=True, slots=True)
class SecondSample:
    """What ran at one moment: by stage variant, batch size, ready replicas, rows queued; and cores reserved."""

    at_seconds: float
    stages: Mapping[str, tuple[str, int, int, int]]
    cores: float
    received: int
    outcomes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SimulationResult:
    """A finished simulation of N requests."""

    arrivals_seconds: NDArray[np.float64]
    """[N]."""
    latency_seconds: NDArray[np.float64]
    """[N], until the answer or the refusal."""
    outcomes: NDArray[np.int8]
    accuracy: NDArray[np.float64]
    """[N], expected accuracy of the answer; NaN without one."""
    reasons: Mapping[int, tuple[str, str]]
    """Of those without an answer, (stage, reason) by index."""
    variants: tuple[Mapping[str, str], ...] = field(repr=False)
    """By index, the variant that served each stage."""
    points: tuple[Mapping[str, str], ...] = field(repr=False)
    """By index, the operating point that served each stage."""
    seconds: tuple[SecondSample, ...] = field(repr=False)
    """One entry a second."""
    plans: tuple[PipelinePlan, ...] = field(repr=False)
    """Every decision, the first plan included."""
    mean_cores: float
    """Reserved on average, from the first arrival's second 0 to the end of the load."""
    batch_rows: Mapping[str, float]
    """By stage, mean rows of a batch."""
    starts: int
    """Replicas started after the first plan."""
    duration_seconds: float
    unescalated: NDArray[np.bool_]
    rows_by_point: Mapping[str, Mapping[str, int]]
    """By stage, the rows served at each operating point."""
    escalated_rows: Mapping[str, int]

    def share(self, end: RequestOutcome) -> float:
        """The share of the requests that ended so; 0 without any."""
        return float((self.outcomes == end).mean()) if self.outcomes.size else 0.0

    @property
    def violations(self) -> float:
        """Share of the requests without an answer in time."""
        return 1.0 - self.share(OK) if self.outcomes.size else 0.0

    def latency(self, quantile: float) -> float:
        """A quantile of the latency of the answers; NaN without any."""
        answered = self.latency_seconds[self.outcomes <= LATE]
        return float(np.quantile(answered, quantile)) if answered.size else float("nan")

    @property
    def mean_accuracy(self) -> float:
        """Mean expected accuracy of the answers."""
        known = self.accuracy[self.outcomes <= LATE]
        return float(known.mean()) if known.size else float("nan")
