"""Variants that one replica loads: all of its stage if memory allows, so that a change of variant starts no process."""

from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Stage

MEMORY_SHARE = 0.6


def memory_bytes_per_replica(pipeline: InferencePipeline, limit_cores: float, available_bytes: float) -> float:
    """Divide the memory by the maximum number of replicas that the cores allow."""
    min_cores = min(variant.resources.cpu for stage in pipeline.spec.stages for variant in stage.variants)
    max_replicas = max(int(limit_cores / min_cores + 1e-9), len(pipeline.spec.stages))
    return MEMORY_SHARE * available_bytes / max_replicas


def variants_to_load(stage: Stage, needed: str, memory_bytes: float) -> tuple[str, ...]:
    """Return the needed variant and those closest in accuracy that fit in memory."""
    reference = stage.variant(needed)
    others = [variant for variant in stage.variants if variant.name != needed]
    others.sort(key=lambda variant: (abs(variant.accuracy - reference.accuracy), variant.resources.memory))
    loaded, used = {needed}, reference.resources.memory
    for variant in others:
        if used + variant.resources.memory <= memory_bytes:
            loaded.add(variant.name)
            used += variant.resources.memory
    return tuple(variant.name for variant in stage.variants if variant.name in loaded)
