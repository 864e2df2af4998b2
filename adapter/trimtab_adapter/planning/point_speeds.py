"""`PointSpeeds`: speeds of a stage's profiled operating points with full batches of each size."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.planning.candidate import most_rows
from trimtab_adapter.planning.planning_problem import PlanningError, PlanningProblem, ProfiledPoint, service_ratio
from trimtab_pipelines.model_spec import MAX_BODY_BYTES, max_rows
from trimtab_pipelines.profile import PointProfile
from trimtab_pipelines.spec import ServiceLevel
from trimtab_pipelines.stages import Stage

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class PointSpeeds:
    """Speeds, corrected by the observed service ratios; arrays of shape [points, sizes]."""

    profiles: Sequence[PointProfile]
    ratios: Sequence[float]
    quantile: float
    """Of service times: the SLO's."""
    sizes: Floats
    """Of batches, of shape [sizes]."""
    rps: Floats
    """Rows per second of one replica."""
    seconds: Floats
    """Service times; of a generation stage, times to first token."""
    fits: NDArray[np.bool_]
    """Whether a batch is not too large for the variant."""
    row_seconds: Floats
    """Those of one row, of shape [points]."""
    first_rps: Floats
    """Rows per second whose first tokens one replica computes; `rps` for stages that do not generate."""
    in_time: NDArray[np.bool_]
    """Whether time per output token and latency meet the SLO; True for stages that do not generate."""

    @classmethod
    def of(
        cls, problem: PlanningProblem, stage: Stage, profiled: Sequence[ProfiledPoint], sizes: Sequence[int]
    ) -> Self:
        """Raise PlanningError if a row is too large for the replicas."""
        rows, slo = max_rows(problem.spec, stage), problem.spec.slo
        if rows == 0 and not any(variant.container for variant in stage.variants):
            raise PlanningError(
                f"stage {stage.name}: one row of its inputs exceeds the {MAX_BODY_BYTES} bytes that a replica accepts "
                "per request; make its tensors smaller"
            )
        profiles = [profile for _, _, profile in profiled]
        ratios = [service_ratio(problem, stage, variant, profile) for variant, _, profile in profiled]
        by_point = np.array(ratios)[:, None]
        curves = [profile.to_first_token for profile in profiles]
        rps = np.array([[profile.throughput_rps(size) for size in sizes] for profile in profiles]) / by_point
        first_rps = rps
        if stage.generates:
            first_rps = np.array([[curve.throughput_rps(size) for size in sizes] for curve in curves]) / by_point
        return cls(
            profiles,
            ratios,
            slo.quantile,
            np.array(sizes, dtype=np.float64),
            rps,
            np.array([[curve.latency_seconds(size, slo.quantile) for size in sizes] for curve in curves]) * by_point,
            np.array(sizes) <= np.array([most_rows(variant, rows) for variant, _, _ in profiled])[:, None],
            np.array([curve.latency_seconds(1, slo.quantile) for curve in curves]) * ratios,
            first_rps,
            np.array([[_generates_in_time(profile, size, slo) for size in sizes] for profile in profiles]),
        )

    def escalated_seconds(self, points: Indices, shares: Floats) -> Floats:
        """Service times of the escalated rows of a batch, of shape [points, sizes]; `shares`: of the rows, by point."""
        rows = np.ceil(shares[:, None] * self.sizes).astype(int).tolist()
        pairs = [(self.profiles[point].to_first_token, self.ratios[point]) for point in points.tolist()]
        seconds = [
            [curve.latency_seconds(size, self.quantile) * ratio for size in sizes]
            for (curve, ratio), sizes in zip(pairs, rows, strict=True)
        ]
        return np.array(seconds).reshape(-1, self.sizes.size)

    def max_rps(self, allowed: Sequence[frozenset[int]]) -> Floats:
        """Rows per second at the fastest of the allowed points whose variants take such batches, [sets, sizes]."""
        rps = np.where(self.fits, self.rps, 0.0)
        fastest = {points: rps[[*points]].max(axis=0) for points in {*allowed}}
        return np.array([fastest[points] for points in allowed]).reshape(-1, self.sizes.size)


def _generates_in_time(profile: PointProfile, batch_size: int, slo: ServiceLevel) -> bool:
    chats = profile.chats
    if chats is None or slo.time_to_first_token_seconds is None:
        return True
    total, first = (curve.latency_seconds(batch_size, 0.5) for curve in (profile, profile.to_first_token))
    token_seconds = (total - first) / max(chats.tokens - 1.0, 1.0)
    in_time = slo.time_per_output_token_seconds is None or token_seconds <= slo.time_per_output_token_seconds
    return in_time and profile.latency_seconds(batch_size, slo.quantile) <= slo.latency_seconds
