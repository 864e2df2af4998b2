"""How long a prompt takes to be read, by its tokens: as profiles measure, plans tell and routers look up. Pure."""

from bisect import bisect_left
from collections.abc import Mapping


def prefill_seconds(measured: Mapping[int, float], tokens: float) -> float:
    """Seconds until an answer to a prompt of so many tokens begins, where nothing else is read or written.

    Between two lengths a straight line, below the least its value; beyond the greatest it goes on as between the last
    two, for what was too long to be measured is not read for nothing.

    Args:
        measured: seconds by tokens; where there are none, nothing is known and it takes 0.
        tokens: of the prompt.
    """
    lengths = sorted(measured)
    if not lengths:
        return 0.0
    place = bisect_left(lengths, tokens)
    if place == 0 or len(lengths) == 1:
        return measured[lengths[0]]
    low, high = lengths[min(place, len(lengths) - 1) - 1], lengths[min(place, len(lengths) - 1)]
    slope = (measured[high] - measured[low]) / (high - low)
    return max(measured[low] + slope * (tokens - low), 0.0)
