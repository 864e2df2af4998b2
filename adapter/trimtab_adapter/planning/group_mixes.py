"""Mixes over two replica groups of one stage, each with replicas of its own."""

import numpy as np

from trimtab_adapter.planning.mixes import MAX_COUNTS, Hulls, offered_counts
from trimtab_adapter.planning.option_arrays import CandidateArrays, OptionArrays
from trimtab_adapter.planning.point_speeds import Floats
from trimtab_pipelines.plan import StagePlan


def group_mixes(
    candidates: CandidateArrays, hulls: Hulls, needed: Floats, peak_rps: float, running: StagePlan | None
) -> OptionArrays:
    """Mixes of candidates of one batch size in two replica groups, each on the hull of its group.

    Each has some replicas for the heavier one, and the fewest for the lighter one that carry the other rows and, with
    the heavier group's, `peak_rps`. The current numbers are among them. `needed`: replicas that carry all rows.
    """
    hosted, sizes = candidates.hosted[hulls.corners], candidates.batch_size[hulls.corners]
    accuracy, groups = candidates.accuracy[hulls.corners], len({*hosted.tolist()})
    pairs = (hosted[:, None] != hosted) & (sizes[:, None] == sizes) & (accuracy[:, None] >= accuracy)
    heavier, lighter = (hulls.corners[half] for half in np.nonzero(pairs))
    offered = MAX_COUNTS if groups <= 2 else max(2 * MAX_COUNTS // groups, 2)
    current = (running.replicas, sum(group.replicas for group in running.other_groups)) if running else (0, 0)
    most = np.ceil(needed[heavier] - 1e-9) - 1.0
    pair, replicas = offered_counts(np.ones(most.size), most, offered, current[0])
    heavier, lighter = heavier[pair], lighter[pair]
    share = replicas / needed[heavier]
    rest = (1.0 - share) * needed[lighter]
    peak = (peak_rps - replicas * candidates.max_rps[heavier]) / candidates.max_rps[lighter]
    others = np.maximum(np.ceil(np.maximum(rest, peak) - 1e-9), 1.0)
    found = OptionArrays(heavier, lighter, share, replicas, others)
    again = found.take((replicas == current[0]) & (others < current[1]))
    return OptionArrays.join((found, again.with_replicas(*map(float, current))))
