"""Which operating points of the variant that runs the router may use, in which order, and why not the others.

Preferred first means most accurate first: the router takes a faster one where time runs out, if its policy falls back.
More accurate ones than planned it may need under any policy, for requests that ask for more accuracy. A point that
another one beats in everything is left out, since nobody could be served better by it.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from trimtab_adapter.planning.planning_problem import PlanningProblem
from trimtab_adapter.planning.profile_lookup import point_profile
from trimtab_pipelines.plan import PointPlan, unmeasured_point_plan
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.variants import Variant


@dataclass(frozen=True, slots=True)
class AllowedPoints:
    """The planned point, those the router prefers to it and those it falls back to; and the others, each with why."""

    planned: PointPlan
    upgrades: tuple[PointPlan, ...] = ()
    fallbacks: tuple[PointPlan, ...] = ()
    excluded: tuple[str, ...] = ()


def allowed_points(
    problem: PlanningProblem, stage: Stage, variant: Variant, planned: str, batch_sizes: Sequence[int]
) -> AllowedPoints:
    """The points for a plan that runs `planned`, with their seconds at these batch sizes, ascending."""
    own = _measured(problem, stage, variant, planned, batch_sizes)
    if stage.pin.operating_point is not None:
        return AllowedPoints(own.model_copy(update={"escalations": ()}))
    others = [point.name for point in variant.points if point.name != planned]
    known = [own, *(_measured(problem, stage, variant, name, batch_sizes) for name in others)]
    kept, excluded = [own], []
    for point in known[1:]:
        why_not = _why_not(point, known, variant)
        if why_not:
            excluded.append(f"{stage.name}: {variant.name}/{point.name}, {why_not}")
        else:
            kept.append(point)
    names = {point.name for point in kept} if problem.spec.policy_traits.escalates else set[str]()
    kept = [_looking(point, names) for point in kept]
    own = kept[0]
    kept.sort(key=lambda point: (-point.accuracy, _slowest(point)))
    place = kept.index(own)
    fallbacks = kept[place + 1 :] if problem.spec.policy_traits.uses_fallbacks else ()
    return AllowedPoints(own, tuple(kept[:place]), tuple(fallbacks), tuple(excluded))


def _looking(point: PointPlan, names: Container[str]) -> PointPlan:
    """Return a point with the second looks that may be taken at these points."""
    return point.model_copy(
        update={"escalations": tuple(escalation for escalation in point.escalations if escalation.to in names)}
    )


def _measured(
    problem: PlanningProblem, stage: Stage, variant: Variant, name: str, batch_sizes: Iterable[int]
) -> PointPlan:
    """A point with its accuracy on the pipeline's basis; without seconds where it was not measured."""
    point = variant.point(name)
    profile = point_profile(problem, stage, variant, point)
    begun = None if profile is None else profile.to_first_token  # which is what the router sees of who writes
    seconds = {} if begun is None else {size: begun.latency_seconds(size, 0.5) for size in batch_sizes}
    found = unmeasured_point_plan(point, problem.spec.objective.accuracy_basis)
    return found.model_copy(update={"service_seconds": seconds})


def _why_not(point: PointPlan, known: Sequence[PointPlan], variant: Variant) -> str:
    """Say why the router should not run a point; nothing where it should."""
    if not point.service_seconds:
        return f"which was not measured with {variant.resources.cpu:g} cores"
    place = known.index(point)
    for other in known:
        if other is not point and _beats(other, point, first=known.index(other) < place):
            size = max(point.service_seconds)
            mine, its = (1e3 * one.service_seconds[size] for one in (point, other))
            return f"since {other.name} is as accurate and as fast: {its:.3g} ms against {mine:.3g} ms at batch {size}"
    return ""


def _beats(one: PointPlan, other: PointPlan, *, first: bool) -> bool:
    """Whether nobody is served better by `other`; of two that are equal in everything the first stays."""
    if not one.service_seconds or not _serves_all(one, other):
        return False
    gains = [one.accuracy - other.accuracy]
    gains += [_on(one, task) - _on(other, task) for task in one.accuracy_by_task.keys() | other.accuracy_by_task.keys()]
    gains += [other.service_seconds[size] - seconds for size, seconds in one.service_seconds.items()]
    return min(gains) >= 0 and (first or max(gains) > 0)


def _serves_all(one: PointPlan, other: PointPlan) -> bool:
    """Whether a point can answer every request that another can: it reads nothing that the other does without."""
    if not other.inputs:
        return True
    return bool(one.inputs) and set(one.inputs) <= set(other.inputs)


def _on(point: PointPlan, task: str) -> float:
    return point.accuracy_by_task.get(task, point.accuracy)


def _slowest(point: PointPlan) -> float:
    return max(point.service_seconds.values(), default=0.0)
