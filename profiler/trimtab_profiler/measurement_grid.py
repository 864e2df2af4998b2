"""Which points to measure, and what a fraction of a core makes of them. Pure.

A replica computes with whole threads. With c ≥ 1 cores it is measured with ⌊c⌋ threads, and what is measured stands as
it is. A replica with a fraction of a core shares that core with others: when the node is full, its share is what it is
entitled to, so its service time is the one measured alone on a core ÷ the fraction, and its throughput × the fraction.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab_pipelines.profile import Measurement
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.variants import Variant

LARGEST_BATCH = 64


@dataclass(frozen=True, slots=True)
class GridPoint:
    """One operating point of one variant, to be measured with `threads` for each of `allocations` (cores)."""

    variant: str
    operating_point: str
    threads: int
    allocations: tuple[float, ...]
    batch_sizes: tuple[int, ...]


def grid(stage: Stage, cores: Sequence[float], node_cores: int, batch_sizes: Sequence[int] = ()) -> list[GridPoint]:
    """List what to measure for a stage, ordered by threads, so that one replica after the other can do it.

    Args:
        stage: the stage.
        cores: allocations measured for every variant beside its own; those above the node's cores are left out.
        node_cores: cores of this machine.
        batch_sizes: none means the powers of two up to 64; those above a variant's maximum are left out.

    Raises:
        ValueError: a variant asks for more cores than there are.
    """
    points = []
    for variant in stage.variants:
        if variant.resources.cpu > node_cores:
            raise ValueError(
                f"stage {stage.name}: variant {variant.name} asks for resources.cpu {variant.resources.cpu:g}, "
                f"but this machine has {node_cores} cores; lower it or profile on a larger machine"
            )
        wanted = {variant.resources.cpu, *(allocation for allocation in cores if 0 < allocation <= node_cores)}
        for threads in sorted({threads_of(allocation) for allocation in wanted}):
            allocations = tuple(sorted(a for a in wanted if threads_of(a) == threads))
            sizes = batches_of(variant, batch_sizes)
            points += [GridPoint(variant.name, p.name, threads, allocations, sizes) for p in variant.points]
    return sorted(points, key=lambda point: point.threads)


def threads_of(cores: float) -> int:
    """Threads a replica computes with."""
    return max(1, math.floor(cores + 1e-9))


def batches_of(variant: Variant, batch_sizes: Sequence[int] = ()) -> tuple[int, ...]:
    """The batch sizes to measure, ascending; 1 is always among them."""
    wanted = batch_sizes or [2**power for power in range(LARGEST_BATCH.bit_length())]
    return tuple(sorted({1, *(size for size in wanted if size <= variant.max_batch_size)}))


def share(measurement: Measurement, cores: float) -> Measurement:
    """What a measurement with whole cores means for a replica with `cores`."""
    if cores >= 1:
        return measurement
    return Measurement(
        batch_size=measurement.batch_size,
        latency_seconds_mean=measurement.latency_seconds_mean / cores,
        latency_seconds_p50=measurement.latency_seconds_p50 / cores,
        latency_seconds_p99=measurement.latency_seconds_p99 / cores,
        throughput_rps=measurement.throughput_rps * cores,
        batches=measurement.batches,
    )
