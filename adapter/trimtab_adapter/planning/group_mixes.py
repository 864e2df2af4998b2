"""Mixes and cascades over two replica groups of one stage, each with replicas of its own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import ceil

from trimtab_adapter.planning.candidate import SizedCandidate
from trimtab_adapter.planning.mixes import Mix, busy_share, corners, hosted_groups, may_mix, offered_counts
from trimtab_adapter.planning.planning_problem import PlanningProblem
from trimtab_pipelines.escalation import EscalationPlan
from trimtab_pipelines.plan import StagePlan
from trimtab_pipelines.row_shares import AnsweredBy
from trimtab_pipelines.shadow_price import escalated_shares, upper_hull


@dataclass(frozen=True, slots=True)
class SplitCascade:
    """A cascade whose escalated rows run on replicas of another group."""

    first: SizedCandidate
    second: SizedCandidate
    escalation: EscalationPlan
    replicas: int
    other_replicas: int
    slo_quantile: float

    @property
    def own(self) -> SizedCandidate:
        return self.first

    @property
    def other(self) -> SizedCandidate:
        return self.second

    @property
    def accuracy(self) -> float:
        return self.escalation.accuracy

    @property
    def least_accuracy(self) -> float:
        """Accuracy of the first point."""
        return self.first.candidate.point_accuracy

    def rows(self) -> dict[AnsweredBy, float]:
        """Shares of the rows by the point that answers them."""
        return escalated_shares(self.first.key, self.escalation)

    @property
    def throughput_rps(self) -> float:
        """Rows per second of all first passes."""
        return self.replicas * self.first.max_rps

    @property
    def seconds(self) -> float:
        """Service time of a full batch and of its escalated rows."""
        rows = ceil(self.escalation.share * self.first.batch_size)
        return self.first.seconds + self.second.candidate.speed.seconds(rows, self.slo_quantile)


def group_mixes(
    problem: PlanningProblem,
    candidates: Sequence[SizedCandidate],
    load_rps: float,
    sustained_rps: float,
    running: StagePlan | None,
) -> Iterator[Mix]:
    """Yield mixes of candidates of one batch size in two replica groups.

    Each has some replicas for the heavier one, and the fewest for the lighter one that carry the other rows and, with
    the heavier group's, the busiest second.
    """
    spec = problem.spec
    if not may_mix(spec, sustained_rps) or not spec.policy_traits.shares_queues:
        return
    busy, utilisation = busy_share(spec), spec.adaptation.target_utilization
    current = running and (running.replicas, sum(group.replicas for group in running.other_groups))
    groups = hosted_groups(candidates)
    for lighter, heavier in _pairs(groups):
        counts = range(1, ceil(sustained_rps / (busy * heavier.replica_rps) - 1e-9))
        for replicas in offered_counts(counts, current[0] if current else 0, len(groups)):
            share = busy * replicas * heavier.replica_rps / sustained_rps
            rest = (1.0 - share) * sustained_rps / (busy * lighter.replica_rps)
            peak = (load_rps / utilisation - replicas * heavier.max_rps) / lighter.max_rps
            fewest = max(ceil(max(rest, peak) - 1e-9), 1)
            yield Mix(lighter, heavier, share, replicas, fewest)
            if current and current[0] == replicas and current[1] > fewest:
                yield Mix(lighter, heavier, share, *current)


def split_cascades(
    problem: PlanningProblem, candidates: Sequence[SizedCandidate], sustained_rps: float
) -> Iterator[SplitCascade]:
    """Yield cascades of candidates of one batch size to another replica group, with one replica for the first pass.

    The second group has the fewest replicas that carry the escalated rows.
    """
    spec = problem.spec
    if not may_mix(spec, sustained_rps) or not spec.policy_traits.shares_queues:
        return
    plain = {sized.key: sized for sized in candidates if sized.candidate.escalation is None}
    for key, first in plain.items():
        for escalation in first.candidate.other_group_escalations if first.candidate.switchable else ():
            second = plain.get(escalation.target(key[0]))
            if second is not None:
                escalated_rps = escalation.share * sustained_rps
                fewest = max(ceil(escalated_rps / (busy_share(spec) * second.replica_rps) - 1e-9), 1)
                yield SplitCascade(first, second, escalation, 1, fewest, spec.slo.quantile)


def _pairs(
    groups: Mapping[frozenset[str], list[SizedCandidate]],
) -> Iterator[tuple[SizedCandidate, SizedCandidate]]:
    """Yield the pairs of a lighter and a heavier candidate of two groups, each undominated in its own group."""
    if len(groups) < 2:
        return
    fronts = {hosted: [corner[2] for corner in upper_hull(corners(group))] for hosted, group in groups.items()}
    for own, other in permutations(fronts, 2):
        for heavier in fronts[own]:
            for lighter in fronts[other]:
                if lighter.candidate.accuracy <= heavier.candidate.accuracy:
                    yield lighter, heavier
