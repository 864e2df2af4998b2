"""One way to answer that may be planned: how fast it is, alone or with a second look."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Protocol

from trimtab_adapter.planning.planning_problem import PlanningError, PlanningProblem
from trimtab_adapter.planning.profile_lookup import profiled_points, service_ratio
from trimtab_pipelines.escalation import EscalationPlan
from trimtab_pipelines.model_spec import MAX_BODY_BYTES, max_rows
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.plan import StagePlan
from trimtab_pipelines.profile import PointProfile
from trimtab_pipelines.spec import ServiceLevel
from trimtab_pipelines.stages import Pin, Stage
from trimtab_pipelines.variants import Variant


class _Pace(Protocol):
    """How fast rows are answered in one way."""

    def replica_rps(self, batch_size: int) -> float:
        """Return rows per second of one replica."""

    def seconds(self, batch_size: int, quantile: float) -> float:
        """Return the service time of a full batch."""


@dataclass(frozen=True, slots=True)
class _Speed:
    """How fast an operating point is here and now: as measured, and observed over profiled service time."""

    profile: PointProfile
    service_ratio: float

    def replica_rps(self, batch_size: int) -> float:
        """Rows per second of one replica."""
        return self.profile.throughput_rps(batch_size) / self.service_ratio

    def seconds(self, batch_size: int, quantile: float) -> float:
        """The service time of a full batch, until its answers begin."""
        return self.profile.to_first_token.latency_seconds(batch_size, quantile) * self.service_ratio

    def generates_in_time(self, batch_size: int, slo: ServiceLevel) -> bool:
        """Whether answers, once begun, keep their pace and are whole in time; of who does not write it is not asked."""
        chats = self.profile.chats
        if chats is None or slo.time_to_first_token_seconds is None:
            return True
        whole, begun = (one.latency_seconds(batch_size, 0.5) for one in (self.profile, self.profile.to_first_token))
        pace = (whole - begun) / max(chats.tokens - 1.0, 1.0)
        kept = slo.time_per_output_token_seconds is None or pace <= slo.time_per_output_token_seconds
        return kept and self.profile.latency_seconds(batch_size, slo.quantile) <= slo.latency_seconds


@dataclass(frozen=True, slots=True)
class _Cascade:
    """Every row at one point, and a share of them at another after that."""

    first: _Pace
    again: _Pace
    share: float

    def replica_rps(self, batch_size: int) -> float:
        """Return rows per second of one replica; those looked at again are gathered to full batches."""
        return 1.0 / (1.0 / self.first.replica_rps(batch_size) + self.share / self.again.replica_rps(batch_size))

    def seconds(self, batch_size: int, quantile: float) -> float:
        """Return the service time of a full batch, and of its least certain rows after it."""
        return self.first.seconds(batch_size, quantile) + self.again.seconds(ceil(self.share * batch_size), quantile)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to answer that may be planned, and all that batches may then run at.

    `look`: the least certain rows are answered again.
    """

    variant: Variant
    point: OperatingPoint
    own: _Pace
    allowed: tuple[_Speed, ...]
    max_rows: int
    """Of a batch."""
    escalation: EscalationPlan | None = None

    def max_rps(self, batch_size: int) -> float:
        """Rows per second of one replica at the fastest point allowed."""
        return max(speed.replica_rps(batch_size) for speed in self.allowed)

    def matches(self, plan: StagePlan) -> bool:
        """Whether a plan runs it, in batches of whatever size."""
        return (self.variant.name, self.point.name, self.escalation) == (
            plan.variant,
            plan.operating_point,
            plan.planned_escalation,
        )


def candidates(problem: PlanningProblem, stage: Stage, pin: Pin) -> Iterator[Candidate]:
    """Yield every way to answer that was profiled and that a pin allows.

    Raises:
        PlanningError: where none was profiled, or where not even one row fits into what a replica takes at once.
    """
    rows = max_rows(problem.spec, stage)
    if rows == 0 and not any(variant.container for variant in stage.variants):
        raise PlanningError(
            f"stage {stage.name}: one row of its inputs is more than the {MAX_BODY_BYTES} bytes that a replica takes "
            "at once; make its tensors smaller"
        )
    found = profiled_points(problem, stage)
    for variant, point, profile in found:
        if pin.variant in {None, variant.name} and pin.operating_point in {None, point.name}:
            own = _Speed(profile, service_ratio(problem, stage, variant, profile))
            most = variant.max_batch_size
            if rows is not None and variant.container is None:
                most = min(most, rows)
            beside = () if uses_single_point(problem, stage) else (one for one in found if one[0] is variant)
            others = {at.operating_point: _Speed(at, service_ratio(problem, stage, variant, at)) for *_, at in beside}
            once = Candidate(variant, point, own, (own, *others.values()), most)
            yield once
            yield from _with_escalations(problem, once, others)


def uses_single_point(problem: PlanningProblem, stage: Stage) -> bool:
    """Whether a stage runs at its planned operating point alone, by the departure policy or by a pin."""
    return not problem.spec.policy_traits.uses_fallbacks or stage.pin.operating_point is not None


def _with_escalations(problem: PlanningProblem, once: Candidate, others: Mapping[str, _Speed]) -> Iterator[Candidate]:
    """Yield the candidate with each second look that its departure policy may take."""
    if problem.spec.policy_traits.escalates:
        for escalation in once.point.planned_escalations(problem.spec.objective.accuracy_basis):
            if escalation.to in others and escalation.share > 0:
                yield replace(
                    once, own=_Cascade(once.own, others[escalation.to], escalation.share), escalation=escalation
                )
