"""Discretization of a resource into cells: the cells that options use and that labels have left.

The SLO is in seconds, the budget in cores and GPUs. The accuracy floor is a resource too: relative to the most accurate
options, each option loses some accuracy (for a product the logarithm, so that losses add up).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.solvers.labels import Labels
from trimtab_adapter.solvers.program import TOLERANCE, Program
from trimtab_adapter.solvers.program_arrays import Floats, ProgramArrays

Resource = Literal["second", "core", "gpu", "floor"]
# An option that uses whole cells counts as such despite rounding; labels get more slack than all options gain by it,
# so that no completion is excluded.
_WHOLE, _LEFT = 1e-9, 1e-6  # of a cell
_SPARE = 1e-6
"""Of what may be lost: where next to nothing may be, cells would be as small as rounding errors."""


@dataclass(frozen=True, slots=True)
class Discretization:
    """One resource in cells, rounded so that no feasible completion is excluded.

    Usage of options is rounded down; what labels have left is rounded up.
    """

    resource: Resource
    total: float
    cells: int
    taken: Sequence[Floats]
    """By each stage's options."""
    heads: Sequence[float]
    """For the floor: the accuracy of the most accurate options of the stages before each one."""
    is_product: bool

    def filled(self, stage: int) -> list[int]:
        """The whole cells that each option of a stage uses at least; too many if it does not fit."""
        cells = self.taken[stage] * (self.cells / self.total) + _WHOLE
        filled: list[int] = np.minimum(cells, self.cells + 1.0).astype(np.intp).tolist()
        return filled

    def left(self, stage: int, labels: Labels) -> NDArray[np.intp]:
        """The cells that labels of the stages before `stage` have left, at least 0."""
        cells = (self.total - self._spent(stage, labels)) * (self.cells / self.total) + _LEFT
        return np.minimum(np.maximum(cells, 0.0), self.cells).astype(np.intp)

    def _spent(self, stage: int, labels: Labels) -> Floats:
        if self.resource == "second":
            return labels.flow_seconds
        if self.resource == "core":
            return labels.cores
        if self.resource == "gpu":
            return labels.gpus
        return np.asarray(self.heads[stage] - _additive(labels.value, is_product=self.is_product))


def discretize(program: Program, arrays: ProgramArrays, resource: Resource, cells: int) -> Discretization:
    """Discretize one resource of a program."""
    is_product = arrays.is_product
    values = [_additive(column.value, is_product=is_product) for column in arrays.columns]
    heads = [0.0, *np.cumsum([value.max() for value in values]).tolist()]
    if resource == "second":
        total = program.slo_seconds
        taken = [share * column.seconds for column, share in zip(arrays.columns, arrays.flow, strict=True)]
    elif resource == "core":
        total, taken = program.cores, [column.cores for column in arrays.columns]
    elif resource == "gpu":
        total, taken = float(program.gpus), [column.gpus for column in arrays.columns]
        cells = min(cells, max(1, program.gpus))  # whole ones
    else:
        floor = _additive(np.array(program.accuracy_floor - TOLERANCE), is_product=is_product)
        total, taken = max(0.0, heads[-1] - float(floor)) + _SPARE, [value.max() - value for value in values]
    return Discretization(resource, total + TOLERANCE, cells, taken, heads, is_product)


def _additive(values: Floats, *, is_product: bool) -> Floats:
    """The logarithm if values multiply, so that losses add up; a value of 0 loses everything."""
    return np.asarray(np.log(np.maximum(values, 1e-300))) if is_product else values
