"""`Candidate`: an operating point of a variant, with or without an escalation."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from trimtab_adapter.planning.planning_problem import PlanningProblem, ProfiledPoint
from trimtab_adapter.solvers.program import TOLERANCE
from trimtab_pipelines.escalation import EscalationPlan
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.plan import StagePlan
from trimtab_pipelines.row_shares import AnsweredBy
from trimtab_pipelines.shadow_price import escalated_shares
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.stages import Pin, Stage
from trimtab_pipelines.variants import Variant


class Candidate(NamedTuple):
    """An operating point that may be planned, with or without an escalation of its low-confidence rows."""

    variant: Variant
    point: OperatingPoint
    point_accuracy: float
    switchable: frozenset[str]
    """Variants whose points may serve batches beside it."""
    first: int
    """The point among the profiled ones, by index."""
    allowed: frozenset[int]
    """Profiled points that count as its replicas' capacity."""
    escalation: EscalationPlan | None = None
    second: int = -1
    """The point that serves the escalated rows; -1 if none does."""

    @property
    def is_split(self) -> bool:
        """Whether the escalated rows run on replicas of another group."""
        return self.escalation is not None and (self.escalation.variant or self.variant.name) not in self.switchable

    @property
    def accuracy(self) -> float:
        """Expected accuracy of all rows."""
        return self.point_accuracy if self.escalation is None else self.escalation.accuracy

    @property
    def share(self) -> float:
        """Share of the rows that are escalated."""
        return 0.0 if self.escalation is None else self.escalation.share

    @property
    def rows(self) -> dict[AnsweredBy, float]:
        """Shares of the rows by the point that answers them."""
        key = self.variant.name, self.point.name
        return {AnsweredBy(*key): 1.0} if self.escalation is None else escalated_shares(key, self.escalation)

    def matches(self, plan: StagePlan) -> bool:
        return (self.variant.name, self.point.name, self.escalation) == (
            plan.variant,
            plan.operating_point,
            plan.planned_escalation,
        )


def candidates(problem: PlanningProblem, stage: Stage, pin: Pin, profiled: Sequence[ProfiledPoint]) -> list[Candidate]:
    """Return every candidate that a pin allows; those with escalations to another replica group come last."""
    basis, least_accuracy = problem.spec.objective.accuracy_basis, _carrying_accuracy(problem, stage)
    keys = {(variant.name, point.name): n for n, (variant, point, _) in enumerate(profiled)}
    accuracies = [point.accuracy_on(basis) for _, point, _ in profiled]
    switchable = _switchable(problem.spec, stage)
    capacity = {
        hosted: frozenset(n for (name, _), n in keys.items() if name in hosted and accuracies[n] >= least_accuracy)
        for hosted in {*switchable.values()}
    }
    found, split = list[Candidate](), list[Candidate]()
    for (name, _), n in keys.items():
        variant, point, _ = profiled[n]
        if pin.variant not in {None, name} or pin.operating_point not in {None, point.name}:
            continue
        hosted = switchable[name]
        own = (n,) if not hosted else (other for (owner, _), other in keys.items() if owner == name)
        base = Candidate(variant, point, accuracies[n], hosted, n, capacity[hosted].union(own))
        found.append(base)
        planned = point.planned_escalations(basis) if problem.spec.policy_traits.escalates else ()
        for escalation in planned:
            second = keys.get(escalation.target(name), n)
            if hosted and second != n and escalation.share > 0:
                cascade = base._replace(escalation=escalation, second=second)
                (split if cascade.is_split else found).append(cascade)
    return found + split


def most_rows(variant: Variant, request_rows: int | None) -> int:
    """Largest batch of a variant; `request_rows`: what one request to our own replicas holds, None if unknown."""
    if request_rows is None or variant.container is not None:
        return variant.max_batch_size
    return min(variant.max_batch_size, request_rows)


def switchable_variants(spec: InferencePipelineSpec, stage: Stage, variant: Variant) -> frozenset[str]:
    """Variants whose points may serve batches if a variant is planned; empty if only the planned point may.

    The policy or a pin may allow fewer than the replica hosts.
    """
    if not spec.policy_traits.uses_fallbacks or stage.pin.operating_point is not None:
        return frozenset()
    if stage.pin.variant is not None:
        return frozenset({variant.name})
    return frozenset(other.name for other in stage.hosted_with(variant.name))


def _switchable(spec: InferencePipelineSpec, stage: Stage) -> dict[str, frozenset[str]]:
    """`switchable_variants` of each variant, found once for those that are hosted together."""
    found: dict[str, frozenset[str]] = {}
    for variant in stage.variants:
        if variant.name not in found:
            names = switchable_variants(spec, stage, variant)
            found |= dict.fromkeys(names or {variant.name}, names)
    return found


def _carrying_accuracy(problem: PlanningProblem, stage: Stage) -> float:
    """The accuracy from which another variant's point counts as capacity: it keeps the floor whatever others run."""
    objective = problem.spec.objective
    if objective.accuracy_floor is None:
        return 0.0
    if objective.accuracy_metric != "Product":
        return inf
    least = 1.0
    for other in problem.spec.stages:
        if other is not stage:
            points = (point for variant in other.variants for point in variant.points)
            least *= min(point.accuracy_on(objective.accuracy_basis) for point in points)
    return objective.accuracy_floor / max(least, TOLERANCE)
