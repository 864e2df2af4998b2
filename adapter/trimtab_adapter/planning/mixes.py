"""Mixes: rows shared by two candidates, if the replicas lack time for the heavier one.

Both are of variants that one replica hosts, or each has replicas of its own (`group_mixes`).
For a batch size, the best mixes lie on the upper hull of (seconds of a row, accuracy). A mix whose heavier half is
given has the hull's neighbor below it as its lighter half.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from trimtab_adapter.planning.option_arrays import CandidateArrays, OptionArrays
from trimtab_adapter.planning.point_speeds import Floats, Indices
from trimtab_pipelines.shadow_price import BUSY_SHARE, extend_hull
from trimtab_pipelines.spec import InferencePipelineSpec

MAX_COUNTS = 8
"""Numbers of replicas that are offered for one mix; fewer if there are more than two groups."""


@dataclass(frozen=True, slots=True)
class Hulls:
    """Upper hulls of the candidates of each replica group and batch size, by index."""

    neighbors: Indices
    """Each candidate of the hull of those no slower than it, after its neighbor below; of shape [2, pairs].

    Only of replicas that host several variants.
    """
    corners: Indices

    @classmethod
    def of(cls, candidates: CandidateArrays) -> Self:
        neighbors: list[tuple[int, int]] = []
        corners: list[int] = []
        hosted, sizes, seconds = candidates.hosted, candidates.batch_size, 1.0 / candidates.rps
        order = np.lexsort((-candidates.accuracy, seconds, hosted, sizes))
        order = order[hosted[order] >= 0]
        several = np.array([len(each.switchable) > 1 for each in candidates.listed])[candidates.number].tolist()
        keys = zip(sizes[order].tolist(), hosted[order].tolist(), strict=True)
        figures = zip(seconds[order].tolist(), candidates.accuracy[order].tolist(), order.tolist(), strict=True)
        before, hull = None, list[tuple[float, float, int]]()
        for key, corner in zip(keys, figures, strict=True):
            if key != before:
                corners += [index for _, _, index in hull]
                before, hull = key, []
            if extend_hull(hull, corner) and len(hull) > 1 and several[corner[2]]:
                neighbors.append((hull[-2][2], hull[-1][2]))
        corners += [index for _, _, index in hull]
        return cls(np.array(neighbors, dtype=np.intp).reshape(-1, 2).T, np.array(corners, dtype=np.intp))


def mixes(hulls: Hulls, needed: Floats, running: int) -> OptionArrays:
    """The best mixes of candidates of one batch size that replicas host, each with enough replicas for all rows.

    `needed`: replicas of each candidate that carry all rows. The number of `running` ones is offered too.
    """
    lighter, heavier = hulls.neighbors
    fewest = np.maximum(np.ceil(needed[lighter] - 1e-9), 1.0)
    pair, replicas = offered_counts(fewest, np.ceil(needed[heavier] - 1e-9) - 1.0, MAX_COUNTS, running)
    lighter, heavier = lighter[pair], heavier[pair]
    share = (replicas - needed[lighter]) / (needed[heavier] - needed[lighter])
    return OptionArrays(heavier, lighter, share, replicas, np.zeros(pair.size))


def offered_counts(fewest: Floats, most: Floats, offered: int, running: int) -> tuple[Indices, Floats]:
    """Some of the numbers of replicas of each pair, evenly spaced, and the running number if it is one of them.

    Returns the pairs by index, and their numbers.
    """
    steps = np.maximum(np.ceil((most - fewest + 1.0) / offered), 1.0)
    counts = fewest[:, None] + steps[:, None] * np.arange(offered)
    between = (fewest <= running) & ((running - fewest) % steps != 0)
    counts = np.column_stack((counts, np.where(between, float(running), np.inf)))
    pair, column = np.nonzero(counts <= most[:, None])
    return pair, counts[pair, column]


def needed_replicas(spec: InferencePipelineSpec, rows_rps: float, replica_rps: Floats) -> Floats:
    """Replicas that carry these rows, as a fraction."""
    return np.asarray(rows_rps / (min(BUSY_SHARE, spec.adaptation.target_utilization) * replica_rps))
