"""Base allocation and stage SLO as the paper defines them."""

import pytest

from tests.builders import a_measured_profile, a_variant, an_echo_pipeline
from trimtab_profiler.base_allocation import base_allocation, stage_slo_seconds

VARIANTS = [a_variant("small"), a_variant("middle"), a_variant("large", resources={"cpu": "2"})]
STAGE = an_echo_pipeline(VARIANTS).spec.stage("first")
POINTS = [
    a_measured_profile({1: 0.080, 8: 0.400}, "small", 1),
    a_measured_profile({1: 0.048, 8: 0.208}, "small", 2),
    a_measured_profile({1: 0.400, 8: 2.560}, "middle", 1),
    a_measured_profile({1: 0.200, 8: 1.280}, "middle", 2),
    a_measured_profile({1: 0.104, 8: 0.720}, "middle", 4),
    a_measured_profile({1: 0.720, 8: 4.800}, "large", 2),
    a_measured_profile({1: 0.400, 8: 2.400}, "large", 4),
    a_measured_profile({1: 0.240, 8: 1.360}, "large", 8),
]


def test_stage_slo_is_five_times_mean_batch_one_latency() -> None:
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
    points = [a_measured_profile({1: 0.1}, name, cores) for name, cores in (("small", 2), ("middle", 1), ("large", 2))]

    assert base_allocation(points, STAGE, 1.0, 1.0) == {"small": 2, "middle": 1, "large": 2}


def test_unmeasured_variant_is_rejected() -> None:
    with pytest.raises(ValueError, match="stage first: variant large was not measured at batch 1 with its own 2 cores"):
        stage_slo_seconds([point for point in POINTS if point.variant != "large"], STAGE)
