"""Which variants one replica loads: all of its stage where memory allows; changing them then starts nothing. Pure."""

from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Stage

MEMORY_SHARE = 0.6


def memory_bytes_per_replica(pipeline: InferencePipeline, limit_cores: float, available_bytes: float) -> float:
    """Share the memory out over the most replicas the cores could ever hold."""
    least_cores = min(variant.resources.cpu for stage in pipeline.spec.stages for variant in stage.variants)
    most_replicas = max(int(limit_cores / least_cores + 1e-9), len(pipeline.spec.stages))
    return MEMORY_SHARE * available_bytes / most_replicas


def variants_to_load(stage: Stage, needed: str, memory_bytes: float) -> tuple[str, ...]:
    """Name the variants to load: the needed one, and with it those nearest in accuracy as long as they fit."""
    wanted = stage.variant(needed)
    others = [variant for variant in stage.variants if variant.name != needed]
    others.sort(key=lambda variant: (abs(variant.accuracy - wanted.accuracy), variant.resources.memory))
    hosted, used = {needed}, wanted.resources.memory
    for variant in others:
        if used + variant.resources.memory <= memory_bytes:
            hosted.add(variant.name)
            used += variant.resources.memory
    return tuple(variant.name for variant in stage.variants if variant.name in hosted)
