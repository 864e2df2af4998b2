"""Prefill time of a prompt by its number of tokens, as profiles measure it and plans publish it."""

from bisect import bisect_left
from collections.abc import Mapping


def prefill_seconds(measured: Mapping[int, float], tokens: float) -> float:
    """Time to first token of a prompt on an otherwise idle replica.

    Interpolates linearly between measured lengths. Below the shortest it returns the shortest's time; beyond the
    longest it extrapolates from the last two.

    Args:
        measured: seconds by number of tokens; 0 is returned if it is empty.
        tokens: of the prompt.
    """
    lengths = sorted(measured)
    if not lengths:
        return 0.0
    index = bisect_left(lengths, tokens)
    if index == 0 or len(lengths) == 1:
        return measured[lengths[0]]
    low, high = lengths[min(index, len(lengths) - 1) - 1], lengths[min(index, len(lengths) - 1)]
    slope = (measured[high] - measured[low]) / (high - low)
    return max(measured[low] + slope * (tokens - low), 0.0)
