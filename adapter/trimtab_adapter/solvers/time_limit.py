"""Scope of one decision: its solves share a time limit and its results a cache.

Past the limit a solver returns what it has proven. Limit and cache belong to the context instead of being parameters
of every function between a decision and its solves: they change how long a result takes and how good its proof is, not
the problem.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

DECISION_SECONDS = 5.0
SOLVE_SECONDS = 5.0
"""Limit of one solve outside a decision."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_end: ContextVar[float] = ContextVar("end", default=math.inf)
_results: ContextVar[dict[tuple[object, tuple[object, ...]], Any] | None] = ContextVar("results", default=None)


@contextmanager
def time_limit(seconds: float = DECISION_SECONDS) -> Iterator[None]:
    """Limit all solves of the block together; a surrounding limit that ends earlier stays."""
    token = _end.set(min(_end.get(), time.monotonic() + seconds))
    results = _results.set({} if (surrounding := _results.get()) is None else surrounding)
    try:
        yield
    finally:
        _results.reset(results)
        _end.reset(token)


def once_per_decision(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Cache the results of a function of hashable arguments inside `time_limit`."""

    @functools.wraps(function)
    def cached(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        results = _results.get()
        if results is None:
            return function(*arguments, **options)
        key = function, arguments
        if key not in results:
            results[key] = function(*arguments, **options)
        result: Result = results[key]
        return result

    return cached


def seconds_left(at_most: float = SOLVE_SECONDS) -> float:
    """Time limit of a solve that begins now; 0 if the decision's time is up."""
    return max(0.0, min(at_most, _end.get() - time.monotonic()))


def out_of_time() -> bool:
    return seconds_left() <= 0.0
