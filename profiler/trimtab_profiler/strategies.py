"""The job strategies of what was profiled: which ways to split the rows of a request no other beats. Pure."""

from collections.abc import Collection, Iterator, Mapping

from trimtab_pipelines.accuracy_evidence import AccuracyBasis
from trimtab_pipelines.profile import ModelProfile, PointProfile
from trimtab_pipelines.scheduling_policies import MAX_SPLIT_ROWS
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.strategies import Escalation, JobStrategies, PointCost, Variant, strategies_of
from trimtab_pipelines.variants import Variant as Declared


def strategies_from(
    pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], most_rows: int = MAX_SPLIT_ROWS
) -> tuple[JobStrategies, ...]:
    """Those of every variant that has several operating points, with each allocation of cores measured.

    Args:
        pipeline: whose accuracies count, by the basis of its objective.
        profiles: by stage.
        most_rows: of a request.
    """
    return tuple(_each(pipeline, profiles, most_rows))


def _each(pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], most_rows: int) -> Iterator[JobStrategies]:
    basis = pipeline.spec.objective.accuracy_basis
    for stage in pipeline.spec.stages:
        measured = profiles[stage.name].spec.points if stage.name in profiles else ()
        for variant in stage.variants:
            accuracies = {point.name: point.measured_accuracy().on(basis) for point in variant.points}
            own = [point for point in measured if point.variant == variant.name and point.operating_point in accuracies]
            for cores in sorted({point.cores for point in own}):
                costs = [_cost(point, accuracies) for point in own if point.cores == cores]
                if len(costs) > 1:
                    whose = Variant(pipeline.name, stage.name, variant.name, cores)
                    looks = _escalations(variant, {cost.name for cost in costs}, basis)
                    yield strategies_of(whose, costs, looks, most_rows)


def _escalations(variant: Declared, measured: Collection[str], basis: AccuracyBasis) -> list[Escalation]:
    """The second looks that a variant declares, as far as both of their points were measured."""
    return [
        Escalation(point.name, look.to, look.share, look.planned(basis).accuracy)
        for point in variant.points
        for look in point.escalations
        if {point.name, look.to} <= set(measured)
    ]


def _cost(point: PointProfile, accuracies: Mapping[str, float]) -> PointCost:
    largest = max(measurement.batch_size for measurement in point.measurements)
    seconds = tuple(point.latency_seconds(size, 0.5) for size in range(1, largest + 1))
    return PointCost(point.operating_point, accuracies[point.operating_point], seconds)
