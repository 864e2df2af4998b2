"""Which of many candidates are dominated: no better in any respect than another. Pure numpy."""

import numpy as np
from numpy.typing import NDArray

_BLOCK = 128


def undominated(costs: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the indices of the rows of `costs` [candidates, respects] that no other row equals or beats in all.

    Of equal rows the first in the sorted order stays. Less is better in every respect.
    """
    if len(costs) <= 1:
        return np.arange(len(costs), dtype=np.intp)
    # In lexicographic order whatever dominates a row stands before it.
    order = np.lexsort(costs.T[::-1])
    columns = np.ascontiguousarray(costs[order].T)
    kept = np.empty(0, dtype=np.intp)
    for start in range(0, columns.shape[1], _BLOCK):
        block = np.arange(start, min(start + _BLOCK, columns.shape[1]))
        block = block[~_beaten(columns[:, kept], columns[:, block])]
        if block.size > 1:
            within = _pairs(columns[:, block], columns[:, block])
            block = block[~np.triu(within, 1).any(axis=0)]
        kept = np.concatenate((kept, block))
    return order[kept]


def _beaten(winners: NDArray[np.float64], rows: NDArray[np.float64]) -> NDArray[np.bool_]:
    if winners.shape[1] == 0:
        return np.zeros(rows.shape[1], dtype=np.bool_)
    return np.asarray(_pairs(winners, rows).any(axis=0))


def _pairs(winners: NDArray[np.float64], rows: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Tell for each pair whether the winner is at most the row in every respect; shape [winners, rows]."""
    result: NDArray[np.bool_] = winners[0][:, None] <= rows[0]
    for winner, row in zip(winners[1:], rows[1:], strict=True):
        result &= winner[:, None] <= row
    return result
