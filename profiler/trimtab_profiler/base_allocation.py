"""Base allocation of a stage: its latency target, and the fewest cores with which each variant meets it.

This follows IPA, section 4.1. The published code differs: it multiplies by 25 instead of 5, averages the largest
allocation, and raises allocations with accuracy.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from trimtab_pipelines.profile import PointProfile
from trimtab_pipelines.stages import Stage

SLO_FACTOR = 5.0


def stage_slo_seconds(points: Iterable[PointProfile], stage: Stage) -> float:
    """Five times the variants' mean latency at batch 1 with their own cores; raise ValueError if one is missing."""
    by_key = {(point.variant, point.operating_point, point.cores): point for point in points}
    latencies = []
    for variant in stage.variants:
        point = by_key.get((variant.name, variant.points[0].name, variant.resources.cpu))
        single = next((m for m in point.measurements if m.batch_size == 1), None) if point else None
        if single is None:
            missing = f"was not measured at batch 1 with its own {variant.resources.cpu:g} cores"
            raise ValueError(f"stage {stage.name}: variant {variant.name} {missing}")
        latencies.append(single.latency_seconds_mean)
    return SLO_FACTOR * float(np.mean(latencies))


def base_allocation(
    points: Sequence[PointProfile], stage: Stage, slo_seconds: float, threshold_rps: float
) -> Mapping[str, float]:
    """The fewest measured cores with which some batch of a variant meets the SLO at p99 and the threshold throughput.

    The first operating point of each variant counts. A variant that never meets them is excluded.
    """
    allocation = {}
    for variant in stage.variants:
        own = [p for p in points if (p.variant, p.operating_point) == (variant.name, variant.points[0].name)]
        enough = [point.cores for point in own if _meets(point, slo_seconds, threshold_rps)]
        if enough:
            allocation[variant.name] = min(enough)
    return allocation


def _meets(point: PointProfile, slo_seconds: float, threshold_rps: float) -> bool:
    return any(m.latency_seconds_p99 <= slo_seconds and m.throughput_rps >= threshold_rps for m in point.measurements)
