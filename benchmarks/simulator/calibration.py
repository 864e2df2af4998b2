"""Calibration of the simulator outside the profile, from the phases of a run that are not compared.

Each answer says how long every stage took with how many rows. Over what the profile says for these rows, and over how
slow the machine was at that moment, that gives how fast a variant is beside a router and a load generator, how much a
busy replica slows another one, and how far service times spread.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulator.course import CALIBRATING, Course
from benchmarks.simulator.pace import Floats, Pace
from trimtab_adapter.simulation.environment import Environment
from trimtab_adapter.simulation.sampling import interpolate_latency, interpolate_sizes
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline

FEWEST_BATCHES = 10


@dataclass(frozen=True, slots=True)
class _Batches:
    """The batches of one variant, beside what the profile says of them."""

    stage: str
    variant: str
    excess: Floats
    """Logarithm of observed over profiled seconds, at the machine's usual speed."""
    sizes: NDArray[np.int32]
    beside: NDArray[np.bool_]
    """Whether another stage's replica was busy when it departed."""
    calm: NDArray[np.bool_]
    """Whether no processor paused meanwhile: pauses are told by the processors' speeds."""


def calibrate(
    pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], records: NDArray[Any], course: Course, pace: Pace
) -> Environment:
    """The conditions under which a run was served.

    Args:
        pipeline: a chain of stages, one replica each.
        profiles: how fast it is, by stage.
        records: of all answered requests, as the load tester keeps them.
        course: what was served.
        pace: how fast the machine was.
    """
    names = [stage.name for stage in pipeline.spec.ordered_stages]
    inside = sum(records[f"queue_seconds:{name}"] + records[f"service_seconds:{name}"] for name in names)
    # Where a request had no row for a stage, it was never there.
    calibrating = np.isin(course.names(records["scheduled"]), CALIBRATING) & ~np.isnan(inside)
    here = records[calibrating]
    overhead = here["latency_seconds"] - inside[calibrating] - (here["sent"] - here["scheduled"])
    found = list(_batches(pipeline, profiles, here, overhead, pace))
    contention = _contention(found)
    excess = {(one.stage, one.variant): one.excess - np.log1p(contention * one.beside) for one in found}
    batches = {(one.stage, one.variant): one for one in found}
    laws = {key: excess_law(excess[key], one.sizes) for key, one in batches.items()}
    return Environment(
        before_seconds=float(np.median(overhead)),
        contention=contention,
        factors={key: tuple(law.factors[batches[key].calm].tolist()) for key, law in laws.items()},
        speeds=pace.speeds,
        service_ratios={key: law.ratio for key, law in laws.items()},
        size_ratios={key: law.by_size for key, law in laws.items()},
        fan_out={("locate", "count"): tuple(np.bincount(records["total"]).astype(float).tolist())},
    )


@dataclass(frozen=True, slots=True)
class ExcessLaw:
    """What batches took over what the profile says: by and large, by size on top of that, and what is left of each."""

    ratio: float
    by_size: Mapping[int, float]
    factors: Floats


def excess_law(excess: Floats, sizes: NDArray[np.int32]) -> ExcessLaw:
    """Part the logarithms of observed over profiled seconds of batches, [N], of these sizes."""
    ratio = float(np.exp(np.median(excess)))
    by_size = _by_size(excess - np.log(ratio), sizes)
    return ExcessLaw(ratio, by_size, np.exp(excess - np.log(ratio * interpolate_sizes(by_size, sizes))))


def _batches(
    pipeline: InferencePipeline,
    profiles: Mapping[str, ModelProfile],
    records: NDArray[Any],
    overhead: Floats,
    pace: Pace,
) -> Iterator[_Batches]:
    """Follow every answer through the stages, and gather what it met there; half its overhead comes before them."""
    at = records["sent"] + overhead / 2.0
    departed, ended = {}, {}
    for stage in pipeline.spec.ordered_stages:
        departed[stage.name] = at + records[f"queue_seconds:{stage.name}"]
        ended[stage.name] = at = departed[stage.name] + records[f"service_seconds:{stage.name}"]
    for stage in pipeline.spec.ordered_stages:
        name, begin = stage.name, departed[stage.name]
        others = [_busy(begin, departed[other], ended[other]) for other in departed if other != name]
        beside = np.logical_or.reduce(others) if others else np.zeros(begin.size, dtype=bool)
        first = once_a_batch(records, name)
        for variant in np.unique(records[f"variant:{name}"]).tolist():
            which = first[records[f"variant:{name}"][first] == variant]
            if which.size < FEWEST_BATCHES:
                continue
            cores = stage.variant(variant).resources.cpu
            point = profiles[name].spec.point(variant, stage.variant(variant).points[0].name, cores)
            if point is None:
                raise ValueError(f"stage {name}: {variant} was served but not profiled with {cores:g} cores")
            sizes = records[f"batch_size:{name}"][which].tolist()
            profiled = np.array([interpolate_latency(point, size, 0.5) for size in sizes])
            seconds = records[f"service_seconds:{name}"][which] / pace.slowness_at(begin[which])
            calm = pace.calm(begin[which], ended[name][which])
            yield _Batches(name, variant, np.log(seconds / profiled), np.array(sizes), beside[which], calm)


def once_a_batch(records: NDArray[Any], stage: str) -> NDArray[np.intp]:
    """Where records [N] first tell of each batch of a stage: all its members tell the same seconds."""
    _, first = np.unique(records[f"service_seconds:{stage}"], return_index=True)
    return first


def _busy(moments: Floats, departed: Floats, ended: Floats) -> NDArray[np.bool_]:
    """For each moment whether one of these batches was under way."""
    begun = np.searchsorted(np.sort(departed), moments, side="right")
    over = np.searchsorted(np.sort(ended), moments, side="right")
    busy: NDArray[np.bool_] = begun > over
    return busy


def _contention(found: Sequence[_Batches]) -> float:
    """By what share batches are slower beside another one, by the medians of each variant."""
    counted = [one for one in found if min(one.beside.sum(), (~one.beside).sum()) >= FEWEST_BATCHES]
    if not counted:
        return 0.0
    slower = [np.expm1(np.median(one.excess[one.beside]) - np.median(one.excess[~one.beside])) for one in counted]
    return max(0.0, float(np.average(slower, weights=[one.beside.sum() for one in counted])))


def _by_size(excess: Floats, sizes: NDArray[np.int32]) -> dict[int, float]:
    """How much each size that was served often enough is off beside the variant as a whole."""
    often = [int(size) for size in np.unique(sizes) if (sizes == size).sum() >= FEWEST_BATCHES]
    return {size: float(np.exp(np.median(excess[sizes == size]))) for size in often} or {1: 1.0}
