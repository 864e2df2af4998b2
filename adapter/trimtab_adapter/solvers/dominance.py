"""Dominance filter: keeps the candidates that no other equals or beats in all criteria."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

_BLOCK = 128
_LATER = np.triu(np.ones((_BLOCK, _BLOCK), dtype=np.bool_), 1)


def undominated(
    criteria: Sequence[NDArray[np.float64]], expired: Callable[[], bool] = lambda: False
) -> NDArray[np.intp]:
    """The indices of the candidates that no other equals or beats in all criteria; each has shape [candidates].

    Smaller is better. Of equal candidates the first in sorted order stays. `expired` is checked before each block;
    candidates not examined by then stay too.
    """
    count = criteria[0].size
    if count <= 1:
        return np.arange(count, dtype=np.intp)
    # In lexicographic order, a dominating candidate comes first and is no worse in the first criterion.
    order = np.lexsort(criteria[::-1])
    columns = np.array([criterion[order] for criterion in criteria[1:] or criteria])
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
    """Whether the winner is at most the row in every criterion; shape [winners, rows]."""
    result: NDArray[np.bool_] = winners[0][:, None] <= rows[0]
    for winner, row in zip(winners[1:], rows[1:], strict=True):
        result &= winner[:, None] <= row
    return result
