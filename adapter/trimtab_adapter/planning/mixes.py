"""Mixes: rows shared by two candidates of a replica with several variants, if it lacks time for the heavier one.

For a batch size, the best mixes lie on the upper hull of (seconds of a row, accuracy). A mix whose heavier half is
given has the hull's neighbor below it as its lighter half.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil

from trimtab_adapter.planning.candidate import Candidate
from trimtab_adapter.planning.planning_problem import PlanningProblem
from trimtab_pipelines.shadow_price import BUSY_SHARE, extend_hull

MAX_COUNTS = 8
"""Numbers of replicas that are offered for one mix."""
_Corner = tuple[float, float, Candidate]
"""Seconds of a row, accuracy, and the candidate."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Two candidates, and the share of rows that the heavier one serves."""

    lighter: Candidate
    heavier: Candidate
    share: float

    @property
    def accuracy(self) -> float:
        return self.lighter.accuracy + self.share * (self.heavier.accuracy - self.lighter.accuracy)

    def max_rps(self, batch_size: int) -> float:
        """Rows per second of one replica at the fastest operating point that may run such batches."""
        return max(half.max_rps(batch_size) for half in (self.lighter, self.heavier))

    def seconds(self, batch_size: int, quantile: float) -> float:
        """Service time of a full batch of the slower half."""
        return max(half.speed.seconds(batch_size, quantile) for half in (self.lighter, self.heavier))


def mixes(
    problem: PlanningProblem, candidates: Sequence[Candidate], batch_size: int, sustained_rps: float, running: int
) -> Iterator[tuple[Mix, int]]:
    """Yield the best mixes of candidates that run such batches, each with a number of replicas that serves all rows.

    The number of `running` replicas is among them if it serves a mix.
    Without an escalating policy there are none.
    """
    spec = problem.spec
    if not spec.policy_traits.escalates or sustained_rps <= 0:
        return
    busy = min(BUSY_SHARE, spec.adaptation.target_utilization)
    for hosted in _groups(candidates):
        for (light_seconds, _, lighter), (heavy_seconds, _, heavier) in _neighbors(hosted, batch_size):
            fewest, all_heavier = (sustained_rps * seconds / busy for seconds in (light_seconds, heavy_seconds))
            counts = range(max(ceil(fewest - 1e-9), 1), ceil(all_heavier - 1e-9))
            offered = {*counts[:: max(ceil(len(counts) / MAX_COUNTS), 1)], *({running} & {*counts})}
            for replicas in sorted(offered):
                seconds = busy * replicas / sustained_rps
                share = (seconds - light_seconds) / (heavy_seconds - light_seconds)
                yield Mix(lighter, heavier, share), replicas


def _groups(candidates: Sequence[Candidate]) -> Iterator[list[Candidate]]:
    """Candidates of several variants that one replica hosts."""
    ordered = sorted(candidates, key=lambda candidate: sorted(candidate.switchable))
    for switchable, hosted in groupby(ordered, key=lambda candidate: candidate.switchable):
        if len(switchable) > 1:
            yield list(hosted)


def _neighbors(candidates: Iterable[Candidate], batch_size: int) -> Iterator[tuple[_Corner, _Corner]]:
    """Yield each candidate of the hull of those no slower than it, after its neighbor below."""
    corners = [
        (1.0 / candidate.speed.replica_rps(batch_size), candidate.accuracy, candidate) for candidate in candidates
    ]
    hull: list[_Corner] = []
    for corner in sorted(corners, key=lambda corner: (corner[0], -corner[1])):
        if extend_hull(hull, corner) and len(hull) > 1:
            yield hull[-2], hull[-1]
