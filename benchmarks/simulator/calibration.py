"""Calibration of the simulator's environment from the phases of a run that are not compared.

Each response reports the service time and the batch size of every stage. Their ratio to the profile, corrected by the
machine's slowness at that moment, gives the speed of a variant beside a router and a load generator, the slowdown by
another busy replica, and the spread of service times.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulator.machine import Floats, MachineRecord
from benchmarks.simulator.phases import CALIBRATING, PhaseSequence
from trimtab_adapter.simulation.environment import Environment
from trimtab_adapter.simulation.sampling import interpolate_latency, interpolate_sizes
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline

MIN_BATCHES = 10


@dataclass(frozen=True, slots=True)
class _Batches:
    """The batches of one variant, compared with its profile."""

    stage: str
    variant: str
    excess: Floats
    """Logarithm of observed over profiled seconds, at the machine's mean speed."""
    sizes: NDArray[np.int32]
    contended: NDArray[np.bool_]
    """Whether another stage's replica was busy at dispatch."""
    unpaused: NDArray[np.bool_]
    """Whether no processor paused during the batch; the processors' speeds contain the pauses."""


def calibrate(
    pipeline: InferencePipeline,
    profiles: Mapping[str, ModelProfile],
    records: NDArray[Any],
    phases: PhaseSequence,
    machine: MachineRecord,
) -> Environment:
    """Return the environment of a served chain of stages, one replica each.

    `records` are the load tester's of all requests with a response.
    """
    names = [stage.name for stage in pipeline.spec.ordered_stages]
    inside = sum(records[f"queue_seconds:{name}"] + records[f"service_seconds:{name}"] for name in names)
    # A request without rows for a stage has no time there.
    calibrating = np.isin(phases.names(records["scheduled"]), CALIBRATING) & ~np.isnan(inside)
    selected = records[calibrating]
    overhead = selected["latency_seconds"] - inside[calibrating] - (selected["sent"] - selected["scheduled"])
    groups = list(_batches(pipeline, profiles, selected, overhead, machine))
    batches = {(group.stage, group.variant): group for group in groups}
    contention = _contention(groups)
    laws = {
        key: excess_law(group.excess - np.log1p(contention * group.contended), group.sizes)
        for key, group in batches.items()
    }
    return Environment(
        before_seconds=float(np.median(overhead)),
        contention=contention,
        factors={key: tuple(law.factors[batches[key].unpaused].tolist()) for key, law in laws.items()},
        speeds=machine.speeds,
        service_ratios={key: law.ratio for key, law in laws.items()},
        size_ratios={key: law.by_size for key, law in laws.items()},
        fan_out={("locate", "count"): tuple(np.bincount(records["total"]).astype(float).tolist())},
    )


@dataclass(frozen=True, slots=True)
class ExcessLaw:
    """Observed over profiled service time: overall ratio, ratio by batch size, and each batch's remaining factor."""

    ratio: float
    by_size: Mapping[int, float]
    factors: Floats


def excess_law(excess: Floats, sizes: NDArray[np.int32]) -> ExcessLaw:
    """Split logarithms of observed over profiled seconds [N] of batches with these sizes."""
    ratio = float(np.exp(np.median(excess)))
    by_size = _by_size(excess - np.log(ratio), sizes)
    return ExcessLaw(ratio, by_size, np.exp(excess - np.log(ratio * interpolate_sizes(by_size, sizes))))


def _batches(
    pipeline: InferencePipeline,
    profiles: Mapping[str, ModelProfile],
    records: NDArray[Any],
    overhead: Floats,
    machine: MachineRecord,
) -> Iterator[_Batches]:
    """Follow every response through the stages; half of its overhead comes before the first one."""
    at = records["sent"] + overhead / 2.0
    dispatched, ended = {}, {}
    for stage in pipeline.spec.ordered_stages:
        dispatched[stage.name] = at + records[f"queue_seconds:{stage.name}"]
        ended[stage.name] = at = dispatched[stage.name] + records[f"service_seconds:{stage.name}"]
    for stage in pipeline.spec.ordered_stages:
        name, begin = stage.name, dispatched[stage.name]
        others = [_busy(begin, dispatched[other], ended[other]) for other in dispatched if other != name]
        contended = np.logical_or.reduce(others) if others else np.zeros(begin.size, dtype=bool)
        first = first_of_each_batch(records, name)
        for variant in np.unique(records[f"variant:{name}"]).tolist():
            index = first[records[f"variant:{name}"][first] == variant]
            if index.size < MIN_BATCHES:
                continue
            cores = stage.variant(variant).resources.cpu
            point = profiles[name].spec.point(variant, stage.variant(variant).points[0].name, cores)
            if point is None:
                raise ValueError(f"stage {name}: {variant} was served but not profiled with {cores:g} cores")
            sizes = records[f"batch_size:{name}"][index].tolist()
            profiled = np.array([interpolate_latency(point, size, 0.5) for size in sizes])
            seconds = records[f"service_seconds:{name}"][index] / machine.slowness_at(begin[index])
            unpaused = machine.without_pause(begin[index], ended[name][index])
            yield _Batches(name, variant, np.log(seconds / profiled), np.array(sizes), contended[index], unpaused)


def first_of_each_batch(records: NDArray[Any], stage: str) -> NDArray[np.intp]:
    """Index of the first of the records [N] of each batch of a stage; all of a batch report the same seconds."""
    _, first = np.unique(records[f"service_seconds:{stage}"], return_index=True)
    return first


def _busy(moments: Floats, dispatched: Floats, ended: Floats) -> NDArray[np.bool_]:
    """Whether one of these batches was in flight, for each moment."""
    begun = np.searchsorted(np.sort(dispatched), moments, side="right")
    over = np.searchsorted(np.sort(ended), moments, side="right")
    busy: NDArray[np.bool_] = begun > over
    return busy


def _contention(groups: Sequence[_Batches]) -> float:
    """Share by which another busy replica slows batches, by the medians of each variant."""
    counted = [group for group in groups if min(group.contended.sum(), (~group.contended).sum()) >= MIN_BATCHES]
    if not counted:
        return 0.0
    slowdowns = [
        np.expm1(np.median(group.excess[group.contended]) - np.median(group.excess[~group.contended]))
        for group in counted
    ]
    return max(0.0, float(np.average(slowdowns, weights=[group.contended.sum() for group in counted])))


def _by_size(excess: Floats, sizes: NDArray[np.int32]) -> dict[int, float]:
    """Ratio of each frequent batch size to the variant's overall ratio."""
    frequent = [int(size) for size in np.unique(sizes) if (sizes == size).sum() >= MIN_BATCHES]
    return {size: float(np.exp(np.median(excess[sizes == size]))) for size in frequent} or {1: 1.0}
