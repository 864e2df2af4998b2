"""How long to wait before what failed is tried again. Pure."""

from collections.abc import Iterator


def backoff(first_seconds: float, longest_seconds: float) -> Iterator[float]:
    """Yield pauses for ever, each twice the last, none longer than the longest."""
    pause_seconds = first_seconds
    while True:
        yield pause_seconds
        pause_seconds = min(2 * pause_seconds, longest_seconds)
