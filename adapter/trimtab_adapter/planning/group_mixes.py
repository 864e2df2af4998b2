"""Mixes and cascades over two replica groups of one stage, each with replicas of its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import ceil

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.planning.candidate import SizedCandidate
from trimtab_adapter.planning.mixes import MAX_COUNTS, Mix, busy_share, corners, hosted_groups, may_mix
from trimtab_adapter.planning.planning_problem import PlanningProblem
from trimtab_pipelines.escalation import EscalationPlan
from trimtab_pipelines.plan import StagePlan
from trimtab_pipelines.row_shares import AnsweredBy
from trimtab_pipelines.shadow_price import escalated_shares, upper_hull

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


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


@dataclass(frozen=True, slots=True)
class GroupMixes:
    """Mixes of candidates of one batch size in two replica groups; arrays of shape [mixes]."""

    candidates: Sequence[SizedCandidate]
    heavier: Indices
    lighter: Indices
    share: Floats
    """Share of rows that the heavier one serves."""
    replicas: Floats
    other_replicas: Floats

    @property
    def throughput_rps(self) -> Floats:
        """Rows per second of all replicas at the fastest points of their groups."""
        max_rps = self.figures(lambda sized: sized.max_rps)
        return np.asarray(self.replicas * max_rps[self.heavier] + self.other_replicas * max_rps[self.lighter])

    @property
    def seconds(self) -> Floats:
        """Service time of a full batch of the slower half."""
        seconds = self.figures(lambda sized: sized.seconds)
        return np.maximum(seconds[self.heavier], seconds[self.lighter])

    @property
    def accuracy(self) -> Floats:
        accuracy = self.figures(lambda sized: sized.candidate.accuracy)
        lighter = accuracy[self.lighter]
        return np.asarray(lighter + self.share * (accuracy[self.heavier] - lighter))

    def figures(self, figure: Callable[[SizedCandidate], float]) -> Floats:
        """A figure of each candidate."""
        return np.array([figure(sized) for sized in self.candidates])

    def take(self, which: NDArray[np.bool_]) -> "GroupMixes":
        return GroupMixes(self.candidates, *(getattr(self, name)[which] for name in self.__slots__[1:]))

    def mix(self, index: int) -> Mix:
        lighter, heavier = (self.candidates[half[index]] for half in (self.lighter, self.heavier))
        counts = int(self.replicas[index]), int(self.other_replicas[index])
        return Mix(lighter, heavier, float(self.share[index]), *counts)


def group_mixes(
    problem: PlanningProblem,
    candidates: Sequence[SizedCandidate],
    load_rps: float,
    sustained_rps: float,
    running: StagePlan | None,
) -> GroupMixes | None:
    """Mixes of candidates of one batch size in two replica groups; None if there are none.

    Each has some replicas for the heavier one, and the fewest for the lighter one that carry the other rows and, with
    the heavier group's, the busiest second. The current numbers are among them.
    """
    spec, groups = problem.spec, hosted_groups(candidates)
    if len(groups) < 2 or not may_mix(spec, sustained_rps) or not spec.policy_traits.shares_queues:
        return None
    pairs = list(_pairs(candidates, groups))
    if not pairs:
        return None
    busy, (heavier, lighter) = busy_share(spec), np.array(pairs).T
    rps, max_rps = np.array([(sized.replica_rps, sized.max_rps) for sized in candidates]).T
    most = np.ceil(sustained_rps / (busy * rps[heavier]) - 1e-9) - 1.0
    offered = MAX_COUNTS if len(groups) == 2 else max(2 * MAX_COUNTS // len(groups), 2)
    counts = 1.0 + np.maximum(np.ceil(most / offered), 1.0)[:, None] * np.arange(offered)
    current = (running.replicas, sum(group.replicas for group in running.other_groups)) if running else (0, 0)
    counts = np.column_stack((counts, np.full(most.size, current[0] or np.inf)))
    pair, column = np.nonzero(counts <= most[:, None])
    replicas, heavier, lighter = counts[pair, column], heavier[pair], lighter[pair]
    share = busy * replicas * rps[heavier] / sustained_rps
    rest = (1.0 - share) * sustained_rps / (busy * rps[lighter])
    peak = (load_rps / spec.adaptation.target_utilization - replicas * max_rps[heavier]) / max_rps[lighter]
    fewest = np.maximum(np.ceil(np.maximum(rest, peak) - 1e-9), 1.0)
    again = np.nonzero((column == offered) & (fewest < current[1]))[0]
    rows = np.concatenate((np.arange(share.size), again))
    others = np.concatenate((fewest, np.full(again.size, float(current[1]))))
    return GroupMixes(candidates, heavier[rows], lighter[rows], share[rows], replicas[rows], others)


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
    candidates: Sequence[SizedCandidate], groups: Mapping[frozenset[str], list[SizedCandidate]]
) -> Iterator[tuple[int, int]]:
    """Yield the heavier and the lighter candidate, by index, of two groups, each undominated in its own group."""
    index = {id(sized): n for n, sized in enumerate(candidates)}
    fronts = {
        hosted: [(index[id(corner[2])], corner[1]) for corner in upper_hull(corners(group))]
        for hosted, group in groups.items()
    }
    for own, other in permutations(fronts, 2):
        for heavier, accuracy in fronts[own]:
            for lighter, lower in fronts[other]:
                if lower <= accuracy:
                    yield heavier, lighter
