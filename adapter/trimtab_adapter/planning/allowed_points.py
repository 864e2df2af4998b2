"""Allowed operating points: those of the running variant and of variants hosted with it, in order of preference.

The most accurate point comes first; the router uses a faster one if time runs out and its policy uses fallbacks. It may
need points above the planned one under any policy, for requests with a higher accuracy floor. A point that another one
dominates in accuracy, speed and inputs is excluded.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trimtab_adapter.planning.candidate import switchable_variants
from trimtab_adapter.planning.planning_problem import PlanningProblem, point_profile
from trimtab_adapter.solvers.program import Option
from trimtab_pipelines.plan import MAX_POINTS, PointPlan, unmeasured_point_plan
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.variants import Variant


@dataclass(frozen=True, slots=True)
class AllowedPoints:
    """The planned point, the preferred ones, the fallbacks, and the excluded ones with the reason."""

    planned: PointPlan
    upgrades: tuple[PointPlan, ...] = ()
    fallbacks: tuple[PointPlan, ...] = ()
    excluded: tuple[str, ...] = ()


def allowed_points(
    problem: PlanningProblem, stage: Stage, option: Option, batch_sizes: Sequence[int], least_accuracy: float = 0.0
) -> AllowedPoints:
    """The points for a plan of an option, with their seconds at these batch sizes, ascending.

    `least_accuracy`: what a fallback of another variant must have.
    """
    variant = stage.variant(option.variant)
    own = _point_plan(problem, stage, variant, variant, option.operating_point, batch_sizes)
    if stage.pin.operating_point is not None:
        return AllowedPoints(own.replace(escalations=()))
    groups = [variant, *(stage.variant(group.variant) for group in option.other_groups)]
    hosted = frozenset[str]().union(*(switchable_variants(problem.spec, stage, own) or {own.name} for own in groups))
    others = [
        _point_plan(problem, stage, variant, other, point.name, batch_sizes)
        for other in stage.variants
        if other.name in hosted and other.max_batch_size >= option.batch_size
        for point in other.points
    ]
    points = [own, *(point for point in others if (point.variant, point.name) != (own.variant, own.name))]
    keys = {point.key(variant.name): point for point in points}
    again = option.planned_escalation
    needed = None if again is None else again.target(variant.name)
    reasons = {
        key: _exclusion_reason(key, points, stage, variant, least_accuracy)
        for key in keys
        if keys[key] is not own and key != needed
    }
    excluded = [f"{stage.name}: {'/'.join(key)}, {reason}" for key, reason in reasons.items() if reason]
    kept = {key: point for key, point in keys.items() if not reasons.get(key)}
    targets = kept.keys() if problem.spec.policy_traits.escalates else set[tuple[str, str]]()
    ordered = [
        point.replace(escalations=tuple(look for look in point.escalations if look.target(key[0]) in targets))
        for key, point in kept.items()
    ]
    own = ordered[0]
    ordered.sort(key=lambda point: (-point.accuracy, max(point.service_seconds.values(), default=0.0)))
    position = ordered.index(own)
    fallbacks = tuple(ordered[position + 1 :]) if problem.spec.policy_traits.uses_fallbacks else ()
    return AllowedPoints(own, tuple(ordered[:position][-MAX_POINTS:]), fallbacks[:MAX_POINTS], tuple(excluded))


def _point_plan(
    problem: PlanningProblem, stage: Stage, planned: Variant, variant: Variant, name: str, batch_sizes: Iterable[int]
) -> PointPlan:
    """A point with its accuracy on the pipeline's basis; without seconds if it was not profiled."""
    point = variant.point(name)
    profile = point_profile(problem, stage, variant, point)
    curve = None if profile is None else profile.to_first_token
    seconds = {} if curve is None else {size: curve.latency_seconds(size, 0.5) for size in batch_sizes}
    owner = None if variant is planned else variant.name
    return unmeasured_point_plan(point, problem.spec.objective.accuracy_basis).replace(
        variant=owner, service_seconds=seconds
    )


def _exclusion_reason(
    key: tuple[str, str], points: Sequence[PointPlan], stage: Stage, planned: Variant, least_accuracy: float
) -> str:
    position, point = next((n, point) for n, point in enumerate(points) if point.key(planned.name) == key)
    hosting_key = stage.hosting_key(stage.variant(key[0]))
    if not point.service_seconds:
        return f"not profiled with {stage.variant(key[0]).resources.cpu:g} cores"
    if point.variant is not None and point.accuracy < min(least_accuracy, points[0].accuracy):
        return f"accuracy {point.accuracy:.4g} does not reach objective.accuracyFloor"
    for n, other in enumerate(points):
        together = stage.hosting_key(stage.variant(other.key(planned.name)[0])) == hosting_key
        if other is not point and together and _dominates(other, point, first=n < position):
            size = max(point.service_seconds)
            own_ms, other_ms = (1e3 * p.service_seconds[size] for p in (point, other))
            name = other.name if other.variant == point.variant else "/".join(other.key(planned.name))
            return f"{name} is as accurate and as fast: {other_ms:.3g} ms against {own_ms:.3g} ms at batch {size}"
    return ""


def _dominates(one: PointPlan, other: PointPlan, *, first: bool) -> bool:
    """Whether `other` is never a better choice than `one`; of two equal points the first stays."""
    # No inputs stand for all of them; a request that lacks one is only accepted by a point that does not read it.
    needs_more_inputs = other.inputs and not (one.inputs and set(one.inputs) <= set(other.inputs))
    if not one.service_seconds or needs_more_inputs:
        return False
    gains = [one.accuracy - other.accuracy]
    for task in one.accuracy_by_task.keys() | other.accuracy_by_task.keys():
        own, others = (point.accuracy_by_task.get(task, point.accuracy) for point in (one, other))
        gains.append(own - others)
    gains += [other.service_seconds[size] - seconds for size, seconds in one.service_seconds.items()]
    return min(gains) >= 0 and (first or max(gains) > 0)
