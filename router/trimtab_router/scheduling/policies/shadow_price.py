"""Shadow price of a second for the queued rows and those about to arrive.

If load were constant and divisible, every row would run at the fastest point first, and the remaining seconds would go
where they add most utility: to the batches of the most utility, along their curves of accuracy over time. The price is
what the last of these seconds adds. It is 0 if every row can run at its best point.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from trimtab_pipelines.row_splits import Floats
from trimtab_pipelines.shadow_price import best_mixes
from trimtab_router.scheduling.policies.interface import SchedulerView
from trimtab_router.scheduling.policies.token_batches import CandidateBatch
from trimtab_router.scheduling.policies.token_options import TokenOptions


def shadow_price(view: SchedulerView, batches: Sequence[CandidateBatch], token_options: TokenOptions) -> float:
    """Return the utility of a second up to the most urgent deadline, if arriving rows are like the queued `batches`."""
    if not batches:
        return 0.0
    request = batches[0].slices[0].request
    horizon = max(request.deadline - request.enqueued_at - view.later_seconds, 1e-6)
    waiting = sum(batch.rows for batch in batches)
    expected = max(waiting, view.arrivals_rps() * horizon)
    seconds = max(view.ready_replicas, 1) * horizon * waiting / expected
    return marginal_utility(_curves(batches, token_options), seconds)


def marginal_utility(curves: Sequence[tuple[int, Sequence[tuple[float, float]]]], seconds: float) -> float:
    """Return the value of the last second; `curves`: rows, and one row's corners (seconds, value), fastest first."""
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
    """Return the rows of each utility level, and the value of one row over its seconds."""
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
