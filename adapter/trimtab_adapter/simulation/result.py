"""Simulation result: one entry per request, one per second, and every plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.request_outcome import LATE, OK, RequestOutcome
from trimtab_router.scheduling.service_time import Key


@dataclass(frozen=True, slots=True)
class SecondSample:
    """State at one time: variant, batch size, ready replicas and queued rows by stage, and reserved cores."""

    at_seconds: float
    stages: Mapping[str, tuple[str, int, int, int]]
    cores: float
    received: int
    outcomes: tuple[int, ...]
    rows: Mapping[str, tuple[Mapping[Key, int], Mapping[tuple[Key, Key], int]]]
    """By stage: rows so far by the point that served them, and escalated rows by their first and second point."""


@dataclass(frozen=True, slots=True, eq=False)
class SimulationResult:
    """A finished simulation of N requests."""

    arrivals_seconds: NDArray[np.float64]
    """[N]."""
    latency_seconds: NDArray[np.float64]
    """[N], until the response or the rejection."""
    outcomes: NDArray[np.int8]
    """[N], the number of a `RequestOutcome` each."""
    accuracy: NDArray[np.float64]
    """[N], expected accuracy of the response; NaN without one."""
    reasons: Mapping[int, tuple[str, str]]
    """(stage, reason) of requests without a response, by index."""
    variants: tuple[Mapping[str, str], ...] = field(repr=False)
    """[N], the variant that served each stage."""
    points: tuple[Mapping[str, str], ...] = field(repr=False)
    """[N], the operating point that served each stage."""
    seconds: tuple[SecondSample, ...] = field(repr=False)
    """One entry per second."""
    plans: tuple[PipelinePlan, ...] = field(repr=False)
    """Every decision, including the first plan."""
    mean_cores: float
    """Mean reserved cores from second 0 to the end of the load."""
    batch_rows: Mapping[str, float]
    """Mean rows of a batch, by stage."""
    starts: int
    """Replicas started after the first plan."""
    duration_seconds: float
    unescalated: NDArray[np.bool_]
    """[N], whether a planned escalation of some rows did not run in time."""
    rows_by_point: Mapping[str, Mapping[Key, int]]
    """By stage: rows served at each operating point of each variant."""
    escalated_rows: Mapping[str, int]
    """By stage: escalated rows."""

    def share(self, end: RequestOutcome) -> float:
        return float((self.outcomes == end).mean()) if self.outcomes.size else 0.0

    @property
    def violations(self) -> float:
        return 1.0 - self.share(OK) if self.outcomes.size else 0.0

    def latency(self, quantile: float) -> float:
        """A quantile of the response latency; NaN without any response."""
        answered = self.latency_seconds[self.outcomes <= LATE]
        return float(np.quantile(answered, quantile)) if answered.size else float("nan")

    @property
    def mean_accuracy(self) -> float:
        """Mean expected accuracy of the responses."""
        known = self.accuracy[self.outcomes <= LATE]
        return float(known.mean()) if known.size else float("nan")
