"""Time limit that the solves of one decision share; past it a solver returns what it has proven.

It belongs to the context instead of being a parameter of every function between a decision and its solves: it changes
how good a result's proof is, not the problem.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

DECISION_SECONDS = 5.0
SOLVE_SECONDS = 5.0
"""Limit of one solve outside a decision."""

_end: ContextVar[float] = ContextVar("end", default=math.inf)


@contextmanager
def time_limit(seconds: float = DECISION_SECONDS) -> Iterator[None]:
    """Limit all solves of the block together; a surrounding limit that ends earlier stays."""
    token = _end.set(min(_end.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _end.reset(token)


def seconds_left(at_most: float = SOLVE_SECONDS) -> float:
    """Time limit of a solve that begins now; 0 if the decision's time is up."""
    return max(0.0, min(at_most, _end.get() - time.monotonic()))


def out_of_time() -> bool:
    return seconds_left() <= 0.0
