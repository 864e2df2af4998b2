"""What a second is worth to all who wait and all who are about to come. Pure.

Were load steady and endlessly divisible, everybody would get the fastest point first, and what seconds are left would
go where they add most utility: to the batches of the most utility, up their curves of accuracy over time. The price is
what the last such second adds. It is 0 where there are seconds for the best point for everybody.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from trimtab_pipelines.accuracy_hull import best_mixes
from trimtab_pipelines.row_splits import Floats
from trimtab_router.scheduling.policies.interface import SchedulerView
from trimtab_router.scheduling.policies.token_batches import CandidateBatch
from trimtab_router.scheduling.policies.token_options import TokenOptions


def shadow_price(view: SchedulerView, batches: Sequence[CandidateBatch], token_options: TokenOptions) -> float:
    """Expected utility of a second.

    Who waits has to be served while as many come as do in the time that the most urgent was given; whichever are more
    share the seconds of that time.

    Args:
        view: how fast rows come, and how many replicas there are.
        batches: what waits; who comes is taken to be like them.
        menu: what they may choose among.
    """
    if not batches:
        return 0.0
    request = batches[0].slices[0].request
    horizon = max(request.deadline - request.enqueued_at - view.later_seconds, 1e-6)
    waiting = sum(batch.rows for batch in batches)
    expected = max(waiting, view.arrivals_rps() * horizon)
    seconds = max(view.ready_replicas, 1) * horizon * waiting / expected
    return marginal_utility(_curves(batches, token_options), seconds)


def marginal_utility(curves: Sequence[tuple[int, Sequence[tuple[float, float]]]], seconds: float) -> float:
    """What the last second adds where seconds go to where they add most.

    Args:
        curves: rows, and the corners of their best mixes (seconds, value) of a row, from the fastest on.
        seconds: for all of them.
    """
    left = seconds - sum(rows * corners[0][0] for rows, corners in curves)
    segments = [
        ((high - low) / (slow - fast), rows * (slow - fast))
        for rows, corners in curves
        for (fast, low), (slow, high) in pairwise(corners)
    ]
    for slope, width in sorted(segments, reverse=True):
        left -= width
        if left < 0:
            return slope
    return 0.0


def _curves(
    batches: Sequence[CandidateBatch], token_options: TokenOptions
) -> list[tuple[int, list[tuple[float, float]]]]:
    """Of the batches of each level of utility: their rows, and what a row of them is worth over its seconds."""
    levels: dict[int, list[CandidateBatch]] = defaultdict(list)
    for batch in batches:
        if not batch.provisional_value:
            levels[batch.level].append(batch)
    seconds = token_options.row_seconds
    fastest = float(seconds.min())
    curves = []
    for level in levels.values():
        rows = sum(batch.rows for batch in level)
        values: Floats = token_options.values([batch.weights for batch in level]).sum(axis=0) / rows
        corners = best_mixes(list(zip(seconds.tolist(), values.tolist(), strict=True)))
        curves.append((rows, corners[1:] or [(fastest, 0.0)]))
    return curves
