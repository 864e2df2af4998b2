"""Base allocation and stage SLO as the paper defines them."""

import pytest

from tests.profiler.builders import a_pipeline, a_point, a_variant
from trimtab_profiler.base_allocation import base_allocation, stage_slo_seconds

STAGE = a_pipeline(
    [a_variant("small", "1", 0.5), a_variant("middle", "1", 0.6), a_variant("large", "2", 0.7)]
).spec.stage("first")
POINTS = [
    a_point("small", 1, {1: 0.100, 8: 0.500}),
    a_point("small", 2, {1: 0.060, 8: 0.260}),
    a_point("middle", 1, {1: 0.500, 8: 3.200}),
    a_point("middle", 2, {1: 0.250, 8: 1.600}),
    a_point("middle", 4, {1: 0.130, 8: 0.900}),
    a_point("large", 2, {1: 0.900, 8: 6.000}),
    a_point("large", 4, {1: 0.500, 8: 3.000}),
    a_point("large", 8, {1: 0.300, 8: 1.700}),
]


def test_stage_slo_is_five_times_mean_batch_one_latency() -> None:
    """Means are p99 / 1.25 here: 0.08, 0.4 and 0.72 s."""
    assert stage_slo_seconds(POINTS, STAGE) == pytest.approx(5 * (0.08 + 0.4 + 0.72) / 3)


@pytest.mark.parametrize(
    ("slo_seconds", "threshold_rps", "expected"),
    [
        (2.0, 2.0, {"small": 1, "middle": 1, "large": 4}),  # large on 2 cores serves 1.4 rps at batch 1
        (2.0, 4.0, {"small": 1, "middle": 2, "large": 8}),  # middle on 1 core serves 3.1 in too long a time
        (0.4, 2.0, {"small": 1, "middle": 2, "large": 8}),  # within 0.4 s only with more cores
        (0.15, 2.0, {"small": 1, "middle": 4}),  # large never meets 0.15 s
        (0.3, 30.0, {"small": 2}),  # 31 rps only by batches of 8 on two cores
    ],
)
def test_fewest_cores_meeting_slo_and_threshold_are_chosen(slo_seconds, threshold_rps, expected) -> None:
    assert base_allocation(POINTS, STAGE, slo_seconds, threshold_rps) == expected


def test_more_accurate_variant_may_need_fewer_cores() -> None:
    """IPA's code makes the allocation grow with accuracy; the paper does not ask for that."""
    points = [a_point("small", 2, {1: 0.1}), a_point("middle", 1, {1: 0.1}), a_point("large", 2, {1: 0.1})]

    assert base_allocation(points, STAGE, 1.0, 1.0) == {"small": 2, "middle": 1, "large": 2}


def test_unmeasured_variant_is_rejected() -> None:
    with pytest.raises(ValueError, match="stage first: variant large was not measured at batch 1 with its own 2 cores"):
        stage_slo_seconds([point for point in POINTS if point.variant != "large"], STAGE)
