"""Predicted memory of a replica, and the memory that variants request because of it."""

import pytest

from tests.builders import a_pipeline, a_stage, a_variant
from trimtab_pipelines.memory_profile import MARGIN, MemoryProfile, peak_bytes, with_measured_memory, with_shared_bytes
from trimtab_pipelines.replica_groups import SERVER_MEMORY_BYTES, memory_bytes, replica_groups

MIB = 2**20


def a_memory_profile(loaded: int, peaks: dict[int, int], start_peak: int = 0) -> MemoryProfile:
    """Sizes in MiB."""
    sizes = {batch: MIB * size for batch, size in peaks.items()}
    return MemoryProfile(loaded_bytes=MIB * loaded, start_peak_bytes=MIB * start_peak, peak_bytes=sizes)


@pytest.mark.parametrize(("batch", "peak"), [(1, 410), (8, 480), (16, 560), (32, 720)])
def test_peak_is_linear_between_and_beyond_sizes(batch: int, peak: int) -> None:
    profile = a_memory_profile(400, {1: 410, 8: 480, 16: 560})

    assert peak_bytes([(profile, batch)]) == pytest.approx(MIB * peak)


def test_hosted_variants_add_weights_and_share_the_rest() -> None:
    alone = {"a": a_memory_profile(500, {8: 700}), "b": a_memory_profile(900, {8: 950}, start_peak=1200)}
    hosted = with_shared_bytes(alone, MIB * 1000)

    assert {profile.shared_bytes for profile in hosted.values()} == {MIB * 400}
    assert peak_bytes([(profile, 8) for profile in hosted.values()]) == MIB * (400 + 100 + 500 + 300)


def test_request_is_raised_to_the_peak_with_a_margin() -> None:
    pipeline = a_pipeline([a_stage(variants=[a_variant("a"), a_variant("b")], batchSizes=[1, 16])])
    assert [stage.name for stage in pipeline.spec.ordered_stages] == ["first"]
    profiles = {name: a_memory_profile(2000, {1: 2100, 16: 4000}) for name in "ab"}
    sized = with_measured_memory(pipeline, {"first": profiles})
    (group,) = replica_groups(sized.spec.ordered_stages[0])

    assert group.names == {"a", "b"}
    needed = MARGIN * peak_bytes([(profile, 16) for profile in profiles.values()])
    assert needed <= memory_bytes(group.variants) < needed + 2 * 32 * MIB


def test_declared_memory_is_a_floor() -> None:
    pipeline = a_pipeline([a_stage(variants=[a_variant("a"), a_variant("unmeasured")])])

    assert with_measured_memory(pipeline, {"first": {"a": a_memory_profile(300, {1: 310})}}) is pipeline


def test_groups_with_other_requests_stay_apart() -> None:
    requests = {"small": {"cpu": 1, "memory": "512Mi"}, "large": {"cpu": 1, "memory": "1Gi"}}
    variants = [a_variant(name, resources=resources) for name, resources in requests.items()]
    needed = int((SERVER_MEMORY_BYTES + 2**30) / MARGIN / MIB)
    sized = with_measured_memory(
        a_pipeline([a_stage(variants=variants)]), {"first": {"small": a_memory_profile(needed, {1: needed})}}
    )

    assert [group.names for group in replica_groups(sized.spec.stages[0])] == [{"small"}, {"large"}]
    assert [variant.resources.memory // MIB for variant in sized.spec.stages[0].variants] == [1056, 1024]


def test_dedicated_variants_get_what_each_needs() -> None:
    stage = a_stage(variants=[a_variant("a"), a_variant("b")], variantPlacement="Dedicated")
    sized = with_measured_memory(a_pipeline([stage]), {"first": {"a": a_memory_profile(2048, {1: 2048})}})

    assert [variant.resources.memory // MIB for variant in sized.spec.stages[0].variants] == [2048, 512]
