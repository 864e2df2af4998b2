"""Mixes: rows shared by two candidates, if the replicas lack time for the heavier one.

Both are of variants that one replica hosts, or each has replicas of its own (`group_mixes`).
For a batch size, the best mixes lie on the upper hull of (seconds of a row, accuracy). A mix whose heavier half is
given has the hull's neighbor below it as its lighter half.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from trimtab_adapter.planning.candidate import SizedCandidate
from trimtab_adapter.planning.planning_problem import PlanningProblem
from trimtab_pipelines.escalation import EscalationPlan
from trimtab_pipelines.row_shares import AnsweredBy, mixed_rows
from trimtab_pipelines.shadow_price import BUSY_SHARE, extend_hull
from trimtab_pipelines.spec import InferencePipelineSpec

MAX_COUNTS = 8
"""Numbers of replicas that are offered for one mix; fewer if there are more than two groups."""
Corner = tuple[float, float, SizedCandidate]
"""Seconds of a row, accuracy, and the candidate."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Two candidates, and the share of rows that the heavier one serves."""

    lighter: SizedCandidate
    heavier: SizedCandidate
    share: float
    replicas: int
    other_replicas: int = 0
    """Replicas of the lighter candidate's own group; 0 if one replica hosts both."""

    @property
    def own(self) -> SizedCandidate:
        return self.heavier

    @property
    def other(self) -> SizedCandidate:
        return self.lighter

    @property
    def escalation(self) -> EscalationPlan | None:
        return self.heavier.candidate.escalation

    @property
    def accuracy(self) -> float:
        lighter, heavier = self.lighter.candidate.accuracy, self.heavier.candidate.accuracy
        return lighter + self.share * (heavier - lighter)

    @property
    def throughput_rps(self) -> float:
        """Rows per second of all replicas at the fastest points of their groups."""
        if not self.other_replicas:
            return self.replicas * max(self.heavier.max_rps, self.lighter.max_rps)
        return self.replicas * self.heavier.max_rps + self.other_replicas * self.lighter.max_rps

    @property
    def least_accuracy(self) -> float:
        """Accuracy of the lighter point."""
        return self.lighter.candidate.point_accuracy

    def rows(self) -> dict[AnsweredBy, float]:
        """Shares of the rows by the point that answers them."""
        return mixed_rows(self.lighter.rows, self.heavier.rows, self.share)

    @property
    def seconds(self) -> float:
        """Service time of a full batch of the slower half."""
        return max(self.lighter.seconds, self.heavier.seconds)


def mixes(
    problem: PlanningProblem, candidates: Sequence[SizedCandidate], sustained_rps: float, running: int
) -> Iterator[Mix]:
    """Yield the best mixes of candidates of one batch size that replicas host, each with enough replicas for all rows.

    The number of `running` replicas is among them if it serves a mix.
    Without an escalating policy there are none.
    """
    if not may_mix(problem.spec, sustained_rps):
        return
    busy = busy_share(problem.spec)
    for switchable, hosted in hosted_groups(candidates).items():
        if len(switchable) < 2:
            continue
        for (light_seconds, _, lighter), (heavy_seconds, _, heavier) in _neighbors(hosted):
            fewest, all_heavier = (sustained_rps * seconds / busy for seconds in (light_seconds, heavy_seconds))
            counts = range(max(ceil(fewest - 1e-9), 1), ceil(all_heavier - 1e-9))
            for replicas in _offered_counts(counts, running):
                seconds = busy * replicas / sustained_rps
                share = (seconds - light_seconds) / (heavy_seconds - light_seconds)
                yield Mix(lighter, heavier, share, replicas)


def may_mix(spec: InferencePipelineSpec, sustained_rps: float) -> bool:
    return spec.policy_traits.escalates and sustained_rps > 0


def _offered_counts(counts: range, running: int) -> list[int]:
    """Some of the numbers of replicas, evenly spaced, and the running number if it is one of them; ascending."""
    return sorted({*counts[:: max(ceil(len(counts) / MAX_COUNTS), 1)], *({running} if running in counts else ())})


def busy_share(spec: InferencePipelineSpec) -> float:
    return min(BUSY_SHARE, spec.adaptation.target_utilization)


def corners(candidates: Iterable[SizedCandidate]) -> Iterator[Corner]:
    return ((1.0 / sized.replica_rps, sized.candidate.accuracy, sized) for sized in candidates)


def hosted_groups(candidates: Iterable[SizedCandidate]) -> dict[frozenset[str], list[SizedCandidate]]:
    """Candidates whose rows may be served by other points, by the variants that their replica hosts."""
    groups: dict[frozenset[str], list[SizedCandidate]] = {}
    for sized in candidates:
        if sized.candidate.switchable:
            groups.setdefault(sized.candidate.switchable, []).append(sized)
    return groups


def _neighbors(candidates: Iterable[SizedCandidate]) -> Iterator[tuple[Corner, Corner]]:
    """Yield each candidate of the hull of those no slower than it, after its neighbor below."""
    hull: list[Corner] = []
    for corner in sorted(corners(candidates), key=lambda corner: (corner[0], -corner[1])):
        if extend_hull(hull, corner) and len(hull) > 1:
            yield hull[-2], hull[-1]
