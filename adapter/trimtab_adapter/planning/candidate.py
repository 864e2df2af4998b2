"""`Candidate`: an operating point of a variant, with or without an escalation, and its speed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from trimtab_adapter.planning.planning_problem import PlanningError, PlanningProblem, profiled_points, service_ratio
from trimtab_pipelines.escalation import EscalationPlan
from trimtab_pipelines.model_spec import MAX_BODY_BYTES, max_rows
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.plan import StagePlan
from trimtab_pipelines.profile import PointProfile
from trimtab_pipelines.spec import ServiceLevel
from trimtab_pipelines.stages import Pin, Stage
from trimtab_pipelines.variants import Variant


@dataclass(frozen=True, slots=True)
class _PointSpeed:
    """Profiled speed of an operating point, corrected by the observed service ratio."""

    profile: PointProfile
    service_ratio: float

    def replica_rps(self, batch_size: int) -> float:
        return self.profile.throughput_rps(batch_size) / self.service_ratio

    def seconds(self, batch_size: int, quantile: float) -> float:
        """Service time of a full batch; of a generation stage the time to first token."""
        return self.profile.to_first_token.latency_seconds(batch_size, quantile) * self.service_ratio

    def generates_in_time(self, batch_size: int, slo: ServiceLevel) -> bool:
        """Whether time per output token and latency meet the SLO; True for other stages."""
        chats = self.profile.chats
        if chats is None or slo.time_to_first_token_seconds is None:
            return True
        total, first = (curve.latency_seconds(batch_size, 0.5) for curve in (self.profile, self.profile.to_first_token))
        token_seconds = (total - first) / max(chats.tokens - 1.0, 1.0)
        in_time = slo.time_per_output_token_seconds is None or token_seconds <= slo.time_per_output_token_seconds
        return in_time and self.profile.latency_seconds(batch_size, slo.quantile) <= slo.latency_seconds


@dataclass(frozen=True, slots=True)
class _Cascade:
    """Speed of a cascade: every row runs at one operating point, and a share of them at a second one."""

    first: _PointSpeed
    second: _PointSpeed
    share: float

    def replica_rps(self, batch_size: int) -> float:
        """Rows per second of one replica; escalated rows are gathered into full batches."""
        return 1.0 / (1.0 / self.first.replica_rps(batch_size) + self.share / self.second.replica_rps(batch_size))

    def seconds(self, batch_size: int, quantile: float) -> float:
        """Service time of a full batch and of its low-confidence rows after it."""
        return self.first.seconds(batch_size, quantile) + self.second.seconds(ceil(self.share * batch_size), quantile)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An operating point that may be planned, the speeds of all points its batches may run at, and an escalation.

    `escalation`: the low-confidence rows run again at a more accurate operating point.
    """

    variant: Variant
    point: OperatingPoint
    speed: _PointSpeed | _Cascade
    allowed_speeds: tuple[_PointSpeed, ...]
    max_rows: int
    """Largest batch."""
    escalation: EscalationPlan | None = None

    def max_rps(self, batch_size: int) -> float:
        """Rows per second of one replica at the fastest allowed operating point."""
        return max(speed.replica_rps(batch_size) for speed in self.allowed_speeds)

    def matches(self, plan: StagePlan) -> bool:
        return (self.variant.name, self.point.name, self.escalation) == (
            plan.variant,
            plan.operating_point,
            plan.planned_escalation,
        )


def candidates(problem: PlanningProblem, stage: Stage, pin: Pin) -> Iterator[Candidate]:
    """Yield every candidate that a pin allows; raise PlanningError if none was profiled, or a row is too large."""
    rows = max_rows(problem.spec, stage)
    if rows == 0 and not any(variant.container for variant in stage.variants):
        raise PlanningError(
            f"stage {stage.name}: one row of its inputs exceeds the {MAX_BODY_BYTES} bytes that a replica accepts per "
            "request; make its tensors smaller"
        )
    profiled = profiled_points(problem, stage)
    # The scheduling policy or a pin may allow the planned operating point only.
    uses_others = problem.spec.policy_traits.uses_fallbacks and stage.pin.operating_point is None
    for variant, point, profile in profiled:
        if pin.variant in {None, variant.name} and pin.operating_point in {None, point.name}:
            speed = _PointSpeed(profile, service_ratio(problem, stage, variant, profile))
            row_limit = variant.max_batch_size
            if rows is not None and variant.container is None:
                row_limit = min(row_limit, rows)
            others = {
                other.operating_point: _PointSpeed(other, service_ratio(problem, stage, variant, other))
                for owner, _, other in profiled
                if uses_others and owner is variant
            }
            base = Candidate(variant, point, speed, (speed, *others.values()), row_limit)
            yield base
            escalations = point.planned_escalations(problem.spec.objective.accuracy_basis)
            for escalation in escalations if problem.spec.policy_traits.escalates else ():
                if not escalation.variant and escalation.to in others and escalation.share > 0:
                    cascade = _Cascade(speed, others[escalation.to], escalation.share)
                    yield replace(base, speed=cascade, escalation=escalation)
