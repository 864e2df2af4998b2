"""Outcomes of a request. Each received request has exactly one, so the outcomes add up to the received requests."""

from enum import IntEnum


class RequestOutcome(IntEnum):
    """Outcome of a request: a number in records, a word in metrics and output."""

    OK = 0
    LATE = 1
    DROPPED = 2
    REFUSED = 3
    FAILED = 4

    @property
    def word(self) -> str:
        return self.name.lower()


OK, LATE, DROPPED, REFUSED, FAILED = RequestOutcome
"""Module-level names for the per-request path, where looking up an enum member is slow."""
