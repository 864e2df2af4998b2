"""How long one decision may take: its many solves share one limit. Past it a solver settles for what it has proven.

The limit is a context's, not a parameter of every function between a decision and its solves: it changes how good a
proof is, never what is asked.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

DECISION_SECONDS = 5.0
SOLVE_SECONDS = 5.0
"""Of one solve, where nobody limits the decision it is part of."""

_end: ContextVar[float] = ContextVar("end", default=math.inf)


@contextmanager
def time_limit(seconds: float = DECISION_SECONDS) -> Iterator[None]:
    """Limit all solves of the block together; a limit around it that ends earlier stays."""
    token = _end.set(min(_end.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _end.reset(token)


def seconds_left(at_most: float = SOLVE_SECONDS) -> float:
    """How long a solve may take that begins now; 0 where the time is up."""
    return max(0.0, min(at_most, _end.get() - time.monotonic()))


def out_of_time() -> bool:
    """Whether the decision has had its time."""
    return seconds_left() <= 0.0
