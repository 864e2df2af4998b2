"""`Candidate`: an operating point of a variant, with or without an escalation, and its speed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import NamedTuple

from trimtab_adapter.planning.planning_problem import PlanningError, PlanningProblem, profiled_points, service_ratio
from trimtab_adapter.solvers.program import TOLERANCE
from trimtab_pipelines.escalation import EscalationPlan
from trimtab_pipelines.model_spec import MAX_BODY_BYTES, max_rows
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.plan import StagePlan
from trimtab_pipelines.profile import PointProfile
from trimtab_pipelines.row_shares import AnsweredBy
from trimtab_pipelines.shadow_price import escalated_shares
from trimtab_pipelines.spec import InferencePipelineSpec, ServiceLevel
from trimtab_pipelines.stages import Pin, Stage
from trimtab_pipelines.variants import Variant

Batches = Sequence[tuple[float, float]]
"""Of full batches of each size: rows per second of one replica, and service time at the SLO's quantile."""


@dataclass(frozen=True, slots=True)
class _PointSpeed:
    """Profiled speed of an operating point, corrected by the observed service ratio."""

    profile: PointProfile
    service_ratio: float
    max_rows: int
    """Largest batch of its variant."""
    found: dict[tuple[int, ...], Batches] = field(default_factory=dict)
    """What `full_batches` found: all cascades of a point ask for the same."""

    def replica_rps(self, batch_size: int) -> float:
        return self.profile.throughput_rps(batch_size) / self.service_ratio

    def full_batches(self, sizes: tuple[int, ...], quantile: float) -> Batches:
        if sizes not in self.found:
            self.found[sizes] = [(self.replica_rps(size), self.seconds(size, quantile)) for size in sizes]
        return self.found[sizes]

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

    @property
    def max_rows(self) -> int:
        """Largest batch of both variants."""
        return min(self.first.max_rows, self.second.max_rows)

    def full_batches(self, sizes: tuple[int, ...], quantile: float) -> Batches:
        """Escalated rows are gathered into full batches; a batch's own run after it."""
        share, both = self.share, (point.full_batches(sizes, quantile) for point in (self.first, self.second))
        return [
            (1.0 / (1.0 / rps + share / then_rps), seconds + self.second.seconds(ceil(share * size), quantile))
            for size, (rps, seconds), (then_rps, _) in zip(sizes, *both, strict=True)
        ]

    def seconds(self, batch_size: int, quantile: float) -> float:
        return self.full_batches((batch_size,), quantile)[0][1]

    def generates_in_time(self, batch_size: int, slo: ServiceLevel) -> bool:
        return self.first.generates_in_time(batch_size, slo)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An operating point that may be planned, the speeds of all points its batches may run at, and an escalation.

    `escalation`: the low-confidence rows run again at a more accurate operating point.
    """

    variant: Variant
    point: OperatingPoint
    speed: _PointSpeed | _Cascade
    allowed_speeds: tuple[_PointSpeed, ...]
    switchable: frozenset[str]
    """Variants whose points may serve batches beside it."""
    point_accuracy: float
    rates: dict[tuple[int, ...], Sequence[float]]
    """What `max_rps` found, shared by the candidates with the same allowed points."""
    escalation: EscalationPlan | None = None
    other_group_escalations: tuple[EscalationPlan, ...] = ()
    """Escalations of the point to variants of other replica groups."""

    @property
    def accuracy(self) -> float:
        """Expected accuracy of all rows."""
        return self.point_accuracy if self.escalation is None else self.escalation.accuracy

    def max_rps(self, sizes: tuple[int, ...], quantile: float) -> Sequence[float]:
        """Rows per second of one replica at the fastest operating point that may run batches of each size."""
        if sizes not in self.rates:
            each = [(speed.max_rows, speed.full_batches(sizes, quantile)) for speed in self.allowed_speeds]
            self.rates[sizes] = [max(b[n][0] for most, b in each if most >= size) for n, size in enumerate(sizes)]
        return self.rates[sizes]

    def matches(self, plan: StagePlan) -> bool:
        return (self.variant.name, self.point.name, self.escalation) == (
            plan.variant,
            plan.operating_point,
            plan.planned_escalation,
        )

    def sized(self, sizes: Sequence[int], slo: ServiceLevel) -> "Iterator[SizedCandidate]":
        """Yield the candidate with batches of each size that is neither too large nor too slow."""
        speed, most = self.speed, self.speed.max_rows
        fitting = tuple(size for size in sizes if size <= most and speed.generates_in_time(size, slo))
        full, most_rps = speed.full_batches(fitting, slo.quantile), self.max_rps(fitting, slo.quantile)
        for size, (rps, seconds), max_rps in zip(fitting, full, most_rps, strict=True):
            yield SizedCandidate(self, size, rps, max_rps, seconds)


class SizedCandidate(NamedTuple):
    """A candidate at a batch size."""

    candidate: Candidate
    batch_size: int
    replica_rps: float
    """Rows per second of one replica."""
    max_rps: float
    """The same at the fastest operating point that may run such batches."""
    seconds: float
    """Service time of a full batch at the SLO's quantile."""

    @property
    def key(self) -> tuple[str, str]:
        """Variant and operating point."""
        return self.candidate.variant.name, self.candidate.point.name

    @property
    def rows(self) -> dict[AnsweredBy, float]:
        """Shares of the rows by the point that answers them."""
        escalation = self.candidate.escalation
        return {AnsweredBy(*self.key): 1.0} if escalation is None else escalated_shares(self.key, escalation)


def candidates(problem: PlanningProblem, stage: Stage, pin: Pin) -> Iterator[Candidate]:
    """Yield every candidate that a pin allows; raise PlanningError if none was profiled, or a row is too large."""
    rows = max_rows(problem.spec, stage)
    if rows == 0 and not any(variant.container for variant in stage.variants):
        raise PlanningError(
            f"stage {stage.name}: one row of its inputs exceeds the {MAX_BODY_BYTES} bytes that a replica accepts per "
            "request; make its tensors smaller"
        )
    profiled = profiled_points(problem, stage)
    speeds = {
        (variant.name, point.name): _PointSpeed(
            profile,
            service_ratio(problem, stage, variant, profile),
            most_rows(variant, rows),
        )
        for variant, point, profile in profiled
    }
    basis, least_accuracy = problem.spec.objective.accuracy_basis, _carrying_accuracy(problem, stage)
    accuracies = {(variant.name, point.name): point.accuracy_on(basis) for variant, point, _ in profiled}
    fastest: dict[frozenset[tuple[str, str]], dict[tuple[int, ...], Sequence[float]]] = {}
    switchable = _switchable(problem.spec, stage)
    for variant, point, _ in profiled:
        if pin.variant in {None, variant.name} and pin.operating_point in {None, point.name}:
            key = variant.name, point.name
            speed, hosted = speeds[key], switchable[variant.name]
            carrying = frozenset(
                other
                for other in speeds
                if other == key
                or (other[0] in hosted and (other[0] == variant.name or accuracies[other] >= least_accuracy))
            )
            planned = point.planned_escalations(basis) if problem.spec.policy_traits.escalates else ()
            escalations = [escalation for escalation in planned if escalation.share > 0]
            elsewhere = tuple(e for e in escalations if e.target(variant.name)[0] not in hosted)
            rates, allowed = fastest.setdefault(carrying, {}), tuple(speeds[other] for other in carrying)
            base = Candidate(variant, point, speed, allowed, hosted, accuracies[key], rates, None, elsewhere)
            yield base
            for escalation in escalations:
                target = escalation.target(variant.name)
                if target[0] in hosted and target != key and target in speeds:
                    cascade = _Cascade(speed, speeds[target], escalation.share)
                    yield replace(base, speed=cascade, escalation=escalation)


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
