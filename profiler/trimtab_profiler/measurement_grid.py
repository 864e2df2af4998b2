"""Measurement grid: the points to measure, and the latency of replicas with a fraction of a core.

A replica with c ≥ 1 cores is measured with ⌊c⌋ threads. A replica with a fraction of a core shares that core: on a full
node its service time is that of a whole core divided by the fraction, and its throughput is multiplied by it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab_pipelines.profile import Measurement
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.variants import Variant

MAX_BATCH = 64


@dataclass(frozen=True, slots=True)
class GridPoint:
    """An operating point of a variant, measured with `threads` for all of `allocations` (cores)."""

    variant: str
    operating_point: str
    threads: int
    allocations: tuple[float, ...]
    batch_sizes: tuple[int, ...]


def grid(stage: Stage, cores: Sequence[float], node_cores: int, batch_sizes: Sequence[int] = ()) -> list[GridPoint]:
    """List the points of a stage, ordered by threads, so that one replica after the other can measure them.

    `cores` are allocations of every variant besides its own, without those above the node's cores. `batch_sizes` are by
    default the powers of two up to 64; those above a variant's maximum are skipped. Raises ValueError if a variant
    requests more cores than the node has.
    """
    points = []
    for variant in stage.variants:
        if variant.resources.cpu > node_cores:
            asked = f"stage {stage.name}: variant {variant.name} requests resources.cpu {variant.resources.cpu:g}"
            cure = "lower it or profile on a larger machine"
            raise ValueError(f"{asked}, but this machine has {node_cores} cores; {cure}")
        others = () if variant.container is not None else cores  # a container sizes itself
        all_allocations = {variant.resources.cpu, *(allocation for allocation in others if allocation <= node_cores)}
        all_allocations = {allocation for allocation in all_allocations if allocation > 0}
        for threads in sorted({threads_of(allocation) for allocation in all_allocations}):
            allocations = tuple(sorted(a for a in all_allocations if threads_of(a) == threads))
            sizes = batches_of(variant, batch_sizes)
            points += [GridPoint(variant.name, p.name, threads, allocations, sizes) for p in variant.points]
    return sorted(points, key=lambda point: point.threads)


def threads_of(cores: float) -> int:
    return max(1, math.floor(cores + 1e-9))


def batches_of(variant: Variant, batch_sizes: Sequence[int] = ()) -> tuple[int, ...]:
    """Batch sizes to measure, ascending, including 1."""
    sizes = batch_sizes or [2**power for power in range(MAX_BATCH.bit_length())]
    return tuple(sorted({1, *(size for size in sizes if size <= variant.max_batch_size)}))


def scale_to_cores(measurement: Measurement, cores: float) -> Measurement:
    """Scale a measurement with whole cores to a replica with `cores`."""
    if cores >= 1:
        return measurement
    names = ("latency_seconds_mean", "latency_seconds_p50", "latency_seconds_p99")
    slower = {name: getattr(measurement, name) / cores for name in names}
    return measurement.replace(**slower, throughput_rps=measurement.throughput_rps * cores)
