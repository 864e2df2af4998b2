"""`MemoryProfile`: measured resident memory of a replica, and the memory of variants that follows from it.

A replica computes one batch at a time, so the variants that it hosts add up their weights, but not their batches.
"""

import math
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping

from pydantic import Field

from trimtab_pipelines.replica_groups import SERVER_MEMORY_BYTES, ReplicaGroup, replica_groups
from trimtab_pipelines.resource import Model
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.variants import Variant

MAX_BYTES = 2**50
MARGIN = 1.25
"""Rows may be longer than the measured ones."""
STEP_BYTES = 32 * 2**20
MemoryProfiles = Mapping[str, "MemoryProfile"]
"""By variant."""


class MemoryProfile(Model):
    """Resident memory of a replica that hosts one variant, in bytes."""

    loaded_bytes: int = Field(ge=0, le=MAX_BYTES)
    """With the variant loaded."""
    shared_bytes: int = Field(default=0, ge=0, le=MAX_BYTES)
    """Of the loaded bytes, what a replica that hosts further variants of the stage has once."""
    start_peak_bytes: int = Field(ge=0, le=MAX_BYTES)
    """Peak while the variant is loaded and warmed up."""
    peak_bytes: dict[int, int] = Field(min_length=1, max_length=64)
    """Peak by batch size."""

    def batch_bytes(self, batch_size: int) -> float:
        """Memory of a batch in addition to the loaded variant; linear between and beyond the measured sizes."""
        sizes = sorted(self.peak_bytes)
        above = min(max(bisect_left(sizes, batch_size), 1), len(sizes) - 1)
        low, high = sizes[max(above - 1, 0)], sizes[above]
        slope = (self.peak_bytes[high] - self.peak_bytes[low]) / (high - low) if high > low else 0.0
        return max(self.peak_bytes[low] + slope * (batch_size - low) - self.loaded_bytes, 0.0)


def peak_bytes(hosted: Iterable[tuple[MemoryProfile, int]]) -> float:
    """Peak of a replica that hosts variants, each with its largest batch size."""
    shared, own, most = 0, 0, 0.0
    for profile, batch_size in hosted:
        shared = max(shared, profile.shared_bytes)
        own += profile.loaded_bytes - profile.shared_bytes
        most = max(most, profile.batch_bytes(batch_size), profile.start_peak_bytes - profile.loaded_bytes)
    return shared + own + most


def with_shared_bytes(alone: MemoryProfiles, together_bytes: int) -> dict[str, MemoryProfile]:
    """Profiles of variants measured alone, given the loaded bytes of a replica that hosts all of them."""
    loaded = [profile.loaded_bytes for profile in alone.values()]
    shared = (sum(loaded) - together_bytes) // max(len(loaded) - 1, 1)
    shared = min(max(shared, 0), *loaded)
    return {name: profile.replace(shared_bytes=shared) for name, profile in alone.items()}


def with_measured_memory(pipeline: InferencePipeline, measured: Mapping[str, MemoryProfiles]) -> InferencePipeline:
    """The pipeline whose variants request at least the memory that was measured, by stage; the same in each group."""
    stages = tuple(_with_memory(stage, measured.get(stage.name, {})) for stage in pipeline.spec.stages)
    return pipeline if stages == pipeline.spec.stages else pipeline.with_spec(stages=stages)


def _with_memory(stage: Stage, measured: MemoryProfiles) -> Stage:
    memory: dict[str, int] = {}
    taken: dict[Hashable, str] = {}
    needs = [(_needed_bytes(stage, group, measured), group) for group in replica_groups(stage)]
    for measured_need, group in sorted(needs, key=lambda need: need[0] > 0):
        needed = max(group.variants[0].resources.memory, measured_need)
        while taken.setdefault(stage.hosting_key(_requesting(group.variants[0], needed)), group.name) != group.name:
            needed += STEP_BYTES  # else two groups would become one
        memory |= dict.fromkeys(group.names, needed)
    variants = tuple(_requesting(variant, memory[variant.name]) for variant in stage.variants)
    return stage if variants == stage.variants else stage.replace(variants=variants)


def _requesting(variant: Variant, memory_bytes: int) -> Variant:
    resources = variant.resources.replace(memory=memory_bytes)
    return variant.replace(resources=resources)


def _needed_bytes(stage: Stage, group: ReplicaGroup, measured: MemoryProfiles) -> int:
    """What each variant of a group adds to the server's memory, with a margin, in whole steps; 0 if not measured."""
    largest = max(stage.batch_sizes)
    hosted = [
        (measured[variant.name], min(largest, variant.max_batch_size))
        for variant in group.variants
        if variant.name in measured
    ]
    if not hosted:
        return 0
    own = MARGIN * peak_bytes(hosted) - SERVER_MEMORY_BYTES
    return math.ceil(max(own, 0.0) / len(hosted) / STEP_BYTES) * STEP_BYTES
