"""The job strategies of what was profiled: which way to split the rows of a request costs least, beside the profile."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from trimtab_pipelines.documents import write_json
from trimtab_pipelines.profile import ModelProfile, PointProfile
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.strategies import (
    Escalation,
    JobStrategies,
    PointCost,
    StrategiesOfPipeline,
    Variant,
    strategies_of,
)
from trimtab_pipelines.variants import Variant as Declared

STRATEGIES_FILE = "strategies.json"


def strategies_from(pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile]) -> StrategiesOfPipeline:
    """Compute them for every variant that has several operating points, with each allocation of cores measured."""
    return StrategiesOfPipeline(variants=tuple(_each(pipeline, profiles)))


def write_strategies(pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], folder: Path) -> Path | None:
    """Write strategies.json into a folder and return its path; None where no variant has several operating points."""
    found = strategies_from(pipeline, profiles)
    if not found.variants:
        return None
    path = folder / STRATEGIES_FILE
    write_json(path, found)
    return path


def _each(pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile]) -> Iterator[JobStrategies]:
    for stage in pipeline.spec.stages:
        measured = profiles[stage.name].spec.points if stage.name in profiles else ()
        for variant in stage.variants:
            accuracies = {point.name: point.accuracy for point in variant.points}
            own = [point for point in measured if point.variant == variant.name and point.operating_point in accuracies]
            for cores in sorted({point.cores for point in own}):
                costs = [_cost(point, accuracies) for point in own if point.cores == cores]
                if len(costs) > 1:
                    whose = Variant(pipeline.name, stage.name, variant.name, cores)
                    yield strategies_of(whose, costs, _escalations(variant, {cost.name for cost in costs}))


def _escalations(variant: Declared, measured: Collection[str]) -> list[Escalation]:
    """The second looks that a variant declares, as far as both of their points were measured."""
    return [
        Escalation(point.name, look.point, look.share, look.accuracy)
        for point in variant.points
        for look in point.second_looks
        if {point.name, look.point} <= set(measured)
    ]


def _cost(point: PointProfile, accuracies: Mapping[str, float]) -> PointCost:
    largest = max(measurement.batch_size for measurement in point.measurements)
    seconds = tuple(point.latency_seconds(size, 0.5) for size in range(1, largest + 1))
    return PointCost(point.operating_point, accuracies[point.operating_point], seconds)
