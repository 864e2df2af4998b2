"""Measurement grid, and latencies scaled to a fraction of a core."""

import pytest

from tests.builders import a_measurement, a_variant, an_echo_pipeline
from trimtab_pipelines.stages import Stage
from trimtab_profiler.measurement_grid import GridPoint, grid, scale_to_cores
from trimtab_profiler.profile import ProfileOptions, point_profile


def a_stage(*variants: dict[str, object]) -> Stage:
    return an_echo_pipeline(variants).spec.stage("first")


def test_allocations_with_equal_threads_are_measured_once() -> None:
    stage = a_stage(
        a_variant("a", resources={"cpu": "250m"}, maxBatchSize=4),
        a_variant("b", resources={"cpu": "2"}, maxBatchSize=100),
    )

    assert grid(stage, cores=(1.0, 2.0, 8.0), node_cores=2) == [
        GridPoint("a", "default", 1, (0.25, 1.0), (1, 2, 4)),
        GridPoint("b", "default", 1, (1.0,), (1, 2, 4, 8, 16, 32, 64)),
        GridPoint("a", "default", 2, (2.0,), (1, 2, 4)),
        GridPoint("b", "default", 2, (2.0,), (1, 2, 4, 8, 16, 32, 64)),
    ]


def test_every_operating_point_is_measured() -> None:
    points = [{"name": "full", "accuracy": 0.9}, {"name": "merged", "tokenDelta": -8, "accuracy": 0.8}]
    stage = a_stage(a_variant("a", operatingPoints=points))

    assert [point.operating_point for point in grid(stage, (), 2)] == ["full", "merged"]


def test_batch_sizes_include_one_and_respect_the_maximum() -> None:
    (point,) = grid(a_stage(a_variant("a", maxBatchSize=10)), (), 2, batch_sizes=(12, 10, 5))

    assert point.batch_sizes == (1, 5, 10)


def test_variant_larger_than_the_machine_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"variant a requests resources.cpu 8, but this machine has 2 cores; lower it"):
        grid(a_stage(a_variant("a", resources={"cpu": "8"})), (), 2)


def test_fraction_of_a_core_scales_latency() -> None:
    measured = a_measurement(4, 0.016, p99_ratio=1.25)
    quarter = scale_to_cores(measured, 0.25)

    assert (quarter.latency_seconds_mean, quarter.latency_seconds_p99) == (0.064, 0.080)
    assert quarter.throughput_rps == pytest.approx(4 / 0.064)
    assert scale_to_cores(measured, 1.0) == scale_to_cores(measured, 1.5) == measured


def test_point_is_scaled_to_each_allocation() -> None:
    point = GridPoint("a", "default", 1, (0.5, 1.0), (1, 2))
    measured = [a_measurement(1, 0.010), a_measurement(2, 0.015)]
    half, whole = (point_profile(point, cores, measured) for cores in point.allocations)

    assert (half.cores, whole.cores) == (0.5, 1.0)
    assert half.latency_seconds(2) == 2 * whole.latency_seconds(2) == pytest.approx(0.036)
    assert half.fit.seconds(1) == pytest.approx(2 * whole.fit.seconds(1))


def test_full_profile_uses_whole_cores_of_the_machine() -> None:
    assert ProfileOptions.full(node_cores=6).cores == (1.0, 2.0, 4.0)
