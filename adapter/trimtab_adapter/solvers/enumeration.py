"""Enumeration: evaluates all choices at once, one array axis per stage. Fastest for up to some thousand choices."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.solvers.option_table import Floats
from trimtab_adapter.solvers.program import TOLERANCE, Program
from trimtab_adapter.solvers.program_arrays import ProgramArrays


def best_of_all(program: Program, arrays: ProgramArrays) -> list[int] | None:
    """The picks of the best choice, None if none satisfies every constraint."""
    columns = arrays.columns
    value = functools.reduce(np.multiply if arrays.is_product else np.add, _axes([c.value for c in columns]))
    possible = _latency(program, [column.seconds for column in columns]) <= program.slo_seconds + TOLERANCE
    possible = possible & (value >= program.accuracy_floor - TOLERANCE)
    for n, limit in enumerate(arrays.limits):
        possible &= sum(_axes([column.uses[n] for column in columns])) <= limit + TOLERANCE
    if arrays.differs:
        possible &= ~functools.reduce(np.logical_and, _axes([column.same for column in columns]))
    if arrays.has_placement_choice:
        either = [functools.reduce(np.logical_or, _axes([c.disaggregated == kind for c in columns])) for kind in (0, 1)]
        possible = possible & ~(either[0] & either[1])
    objective = program.weights.accuracy * value - sum(_axes([column.cost for column in columns]))
    best = int(np.where(possible, objective, -math.inf).argmax())
    if not possible.ravel()[best]:
        return None
    return [int(pick) for pick in np.unravel_index(best, possible.shape)]


def _axes(columns: Sequence[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    """Put each stage's figures on an axis of its own."""
    for k, column in enumerate(columns):
        yield column.reshape([-1 if axis == k else 1 for axis in range(len(columns))])


def _latency(program: Program, seconds: Sequence[Floats]) -> Floats:
    finish: list[Floats] = []
    for stage, own in zip(program.stages, _axes(seconds), strict=True):
        finish.append(functools.reduce(np.maximum, [finish[p] for p in stage.predecessors], np.zeros(())) + own)
    return functools.reduce(np.maximum, finish)
