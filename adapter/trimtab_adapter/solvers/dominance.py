"""Which of many candidates are dominated: no better in any respect than another."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

_BLOCK = 128
_LATER = np.triu(np.ones((_BLOCK, _BLOCK), dtype=np.bool_), 1)


def undominated(
    respects: Sequence[NDArray[np.float64]], expired: Callable[[], bool] = lambda: False
) -> NDArray[np.intp]:
    """The indices of the candidates that no other equals or beats in all respects; each has shape [candidates].

    Of equal candidates the first in the sorted order stays. Less is better in every respect. The function asks before
    each block of candidates whether its time has `expired`; those it did not look at by then stay too.
    """
    count = respects[0].size
    if count <= 1:
        return np.arange(count, dtype=np.intp)
    # In lexicographic order whatever dominates a candidate stands before it, and is no worse in the first respect.
    order = np.lexsort(respects[::-1])
    columns = np.array([respect[order] for respect in respects[1:] or respects])
    kept = np.empty(0, dtype=np.intp)
    for start in range(0, count, _BLOCK):
        if expired():
            kept = np.concatenate((kept, np.arange(start, count)))
            break
        block = np.arange(start, min(start + _BLOCK, count))
        if kept.size:
            block = block[~_pairs(columns[:, kept], columns[:, block]).any(axis=0)]
        if block.size > 1:
            within = _pairs(columns[:, block], columns[:, block])
            within &= _LATER[: block.size, : block.size]
            block = block[~within.any(axis=0)]
        kept = np.concatenate((kept, block)) if kept.size else block
    return np.asarray(order[kept])


def _pairs(winners: NDArray[np.float64], rows: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Tell for each pair whether the winner is at most the row in every respect; shape [winners, rows]."""
    result: NDArray[np.bool_] = winners[0][:, None] <= rows[0]
    for winner, row in zip(winners[1:], rows[1:], strict=True):
        result &= winner[:, None] <= row
    return result
