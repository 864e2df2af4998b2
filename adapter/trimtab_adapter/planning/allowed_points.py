"""Allowed operating points: those of the running variant that the router may use, in order of preference.

The most accurate point comes first; the router uses a faster one if time runs out and its policy uses fallbacks. It may
need points above the planned one under any policy, for requests with a higher accuracy floor. A point that another one
dominates in accuracy, speed and inputs is excluded.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trimtab_adapter.planning.planning_problem import PlanningProblem, point_profile
from trimtab_pipelines.plan import PointPlan, unmeasured_point_plan
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
    problem: PlanningProblem, stage: Stage, variant: Variant, planned: str, batch_sizes: Sequence[int]
) -> AllowedPoints:
    """The points for a plan that runs `planned`, with their seconds at these batch sizes, ascending."""
    own = _point_plan(problem, stage, variant, planned, batch_sizes)
    if stage.pin.operating_point is not None:
        return AllowedPoints(own.model_copy(update={"escalations": ()}))
    others = [point.name for point in variant.points if point.name != planned]
    points = [own, *(_point_plan(problem, stage, variant, name, batch_sizes) for name in others)]
    reasons = {point.name: _exclusion_reason(point, points, variant) for point in points[1:]}
    excluded = [f"{stage.name}: {variant.name}/{name}, {reason}" for name, reason in reasons.items() if reason]
    kept = [point for point in points if not reasons.get(point.name)]
    names = {point.name for point in kept} if problem.spec.policy_traits.escalates else set[str]()
    kept = [
        point.model_copy(
            update={
                "escalations": tuple(again for again in point.escalations if not again.variant and again.to in names)
            }
        )
        for point in kept
    ]
    own = kept[0]
    kept.sort(key=lambda point: (-point.accuracy, max(point.service_seconds.values(), default=0.0)))
    position = kept.index(own)
    fallbacks = tuple(kept[position + 1 :]) if problem.spec.policy_traits.uses_fallbacks else ()
    return AllowedPoints(own, tuple(kept[:position]), fallbacks, tuple(excluded))


def _point_plan(
    problem: PlanningProblem, stage: Stage, variant: Variant, name: str, batch_sizes: Iterable[int]
) -> PointPlan:
    """A point with its accuracy on the pipeline's basis; without seconds if it was not profiled."""
    point = variant.point(name)
    profile = point_profile(problem, stage, variant, point)
    curve = None if profile is None else profile.to_first_token
    seconds = {} if curve is None else {size: curve.latency_seconds(size, 0.5) for size in batch_sizes}
    return unmeasured_point_plan(point, problem.spec.objective.accuracy_basis).model_copy(
        update={"service_seconds": seconds}
    )


def _exclusion_reason(point: PointPlan, points: Sequence[PointPlan], variant: Variant) -> str:
    if not point.service_seconds:
        return f"not profiled with {variant.resources.cpu:g} cores"
    position = points.index(point)
    for n, other in enumerate(points):
        if other is not point and _dominates(other, point, first=n < position):
            size = max(point.service_seconds)
            own_ms, other_ms = (1e3 * p.service_seconds[size] for p in (point, other))
            return f"{other.name} is as accurate and as fast: {other_ms:.3g} ms against {own_ms:.3g} ms at batch {size}"
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
