"""What a simulation gave: one entry a request, one a second, and every plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.request_outcome import LATE, OK, RequestOutcome


@dataclass(frozen=True, slots=True)
class Second:
    """What ran at one moment: by stage variant, batch size, ready replicas, rows queued; and cores reserved."""

    at_seconds: float
    stages: Mapping[str, tuple[str, int, int, int]]
    cores: float
    received: int
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SimulationResult:
    """A finished simulation of N requests.

    Attributes:
        arrivals_seconds: [N].
        latency_seconds: [N], until the answer or the refusal.
        ends: [N], the number of an `RequestOutcome` each.
        accuracy: [N], expected accuracy of the answer; NaN without one.
        reasons: of those without an answer, (stage, reason) by index.
        variants: by index, the variant that served each stage.
        points: by index, the operating point that served each stage.
        seconds: one entry a second.
        plans: every decision, the first plan included.
        mean_cores: reserved on average, from the first arrival's second 0 to the end of the load.
        batch_rows: by stage, mean rows of a batch.
        starts: replicas started after the first plan.
        provisional: [N], whether a second look at some of its rows did not come in time.
        rows_by_point: by stage, the rows served at each operating point.
        rows_again: by stage, the rows that were looked at a second time.
    """

    arrivals_seconds: NDArray[np.float64]
    latency_seconds: NDArray[np.float64]
    ends: NDArray[np.int8]
    accuracy: NDArray[np.float64]
    reasons: Mapping[int, tuple[str, str]]
    variants: tuple[Mapping[str, str], ...] = field(repr=False)
    points: tuple[Mapping[str, str], ...] = field(repr=False)
    seconds: tuple[Second, ...] = field(repr=False)
    plans: tuple[PipelinePlan, ...] = field(repr=False)
    mean_cores: float
    batch_rows: Mapping[str, float]
    starts: int
    duration_seconds: float
    provisional: NDArray[np.bool_]
    rows_by_point: Mapping[str, Mapping[str, int]]
    rows_again: Mapping[str, int]

    def share(self, end: RequestOutcome) -> float:
        """The share of the requests that ended so; 0 without any."""
        return float((self.ends == end).mean()) if self.ends.size else 0.0

    @property
    def violations(self) -> float:
        """Share of the requests without an answer in time."""
        return 1.0 - self.share(OK) if self.ends.size else 0.0

    def latency(self, quantile: float) -> float:
        """A quantile of the latency of the answers; NaN without any."""
        answered = self.latency_seconds[self.ends <= LATE]
        return float(np.quantile(answered, quantile)) if answered.size else float("nan")

    @property
    def mean_accuracy(self) -> float:
        """Mean expected accuracy of the answers."""
        known = self.accuracy[self.ends <= LATE]
        return float(known.mean()) if known.size else float("nan")
