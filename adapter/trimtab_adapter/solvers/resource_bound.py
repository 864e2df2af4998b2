"""Resource bound: an upper bound on every completion that discretizes what is left of one resource or two.

The Lagrangian bound has one price of a second or of accuracy for all labels; a label that has used much cannot reach
it. Here one or two resources are discretized instead: each option uses the whole cells that it fills at least, so no
completion is excluded (a relaxed knapsack). The other resources stay priced. The first axis is the value so far:
completions are convex in it, so chords between a few knots bound it from above.

The accuracy floor is a resource too: relative to the most accurate options, each option loses some accuracy (for a
product the logarithm, so that losses add up).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.solvers.dominance import undominated
from trimtab_adapter.solvers.lagrangian_bound import Prices
from trimtab_adapter.solvers.option_table import Floats
from trimtab_adapter.solvers.program import TOLERANCE, Program
from trimtab_adapter.solvers.program_arrays import Labels, ProgramArrays, Resource

# An option that uses whole cells counts as such despite rounding; labels get more slack than all options gain by it,
# so that no completion is excluded.
_WHOLE, _LEFT = 1e-9, 1e-6  # of a cell
_SPARE = 1e-6
"""Of what may be lost: where next to nothing may be, cells would be as small as rounding errors."""


@dataclass(frozen=True, slots=True)
class Discretization:
    """One resource in cells; usage of options is rounded down, what labels have left is rounded up."""

    resource: Resource
    total: float
    cells: int
    taken: Sequence[Floats]
    """By each stage's options."""
    heads: Sequence[float]
    """For the floor: the accuracy of the most accurate options of the stages before each one."""
    is_product: bool

    def filled(self, stage: int) -> Floats:
        """The whole cells that each option of a stage uses at least; too many if it does not fit."""
        cells = self.taken[stage] * (self.cells / self.total) + _WHOLE
        return np.asarray(np.floor(np.minimum(cells, self.cells + 1.0)))

    def left(self, stage: int, labels: Labels) -> NDArray[np.intp]:
        """The cells that labels of the stages before `stage` have left, at least 0."""
        cells = (self.total - self._spent(stage, labels)) * (self.cells / self.total) + _LEFT
        return np.minimum(np.maximum(cells, 0.0), self.cells).astype(np.intp)

    def _spent(self, stage: int, labels: Labels) -> Floats:
        if self.resource == "second":
            return labels.flow_seconds
        if isinstance(self.resource, int):
            return np.asarray(labels.uses[self.resource])
        return np.asarray(self.heads[stage] - _additive(labels.value, is_product=self.is_product))


def discretize(program: Program, arrays: ProgramArrays, resource: Resource, cells: int) -> Discretization:
    is_product = arrays.is_product
    values = [_additive(column.value, is_product=is_product) for column in arrays.columns]
    heads = [0.0, *np.cumsum([value.max() for value in values]).tolist()]
    if resource == "second":
        total = program.slo_seconds
        taken = [share * column.seconds for column, share in zip(arrays.columns, arrays.flow, strict=True)]
    elif isinstance(resource, int):
        total, taken = arrays.limits[resource], [column.uses[resource] for column in arrays.columns]
        if all((used == np.floor(used)).all() for used in taken):  # whole ones, such as GPUs
            total = math.floor(total + TOLERANCE)
            cells = min(cells, max(1, total))
    else:
        floor = _additive(np.array(program.accuracy_floor - TOLERANCE), is_product=is_product)
        total, taken = max(0.0, heads[-1] - float(floor)) + _SPARE, [value.max() - value for value in values]
    return Discretization(resource, total + TOLERANCE, cells, taken, heads, is_product)


def _additive(values: Floats, *, is_product: bool) -> Floats:
    """The logarithm if values multiply, so that losses add up; a value of 0 loses everything."""
    return np.asarray(np.log(np.maximum(values, 1e-300))) if is_product else values


KNOTS = 6
CELLS = {1: 128, 2: 24}
"""Of each resource, by how many are counted."""
MAX_COUNTED = max(CELLS)
_BLOCK = 16
"""Options whose reach is computed at once: few enough for the processor's cache."""
_NEVER = -1e30
"""Bound of a label without completion; finite, so that interpolation does not give NaN."""


@dataclass(frozen=True, slots=True)
class _Axis:
    """Evenly spaced values of prefixes, (α + ν) times their value, at which a stage's reach is known."""

    least: float
    spacing: float

    def at(self, values_weighted: Floats) -> tuple[NDArray[np.intp], Floats]:
        """The knot below each worth, and how far it is to the next, from 0 to 1."""
        place = np.minimum(np.maximum((values_weighted - self.least) / self.spacing, 0.0), KNOTS - 1.0)
        knot = np.minimum(place.astype(np.intp), KNOTS - 2)
        return knot, np.asarray(place - knot)

    def knots(self) -> Floats:
        return np.asarray(self.least + self.spacing * np.arange(KNOTS))


@dataclass(frozen=True, slots=True)
class ResourceBound:
    """Bounds that discretize one resource or two and price the others."""

    discretizations: Sequence[Discretization]
    prices: Prices
    """0 for the discretized resources."""
    accuracy_weight: float
    """α + ν."""
    axes: Sequence[_Axis]
    """Before each stage, and after the last."""
    reach: Sequence[Floats]
    """The most that the stages from k on add, of shape [knots, cells left, …]."""

    def bound(self, stage: int, labels: Labels) -> Floats:
        """The most that labels of the stages before `stage` can reach, of shape [labels]."""
        place, spacing = np.zeros(1, dtype=np.intp), 1
        for each in reversed(self.discretizations):
            place = place + spacing * each.left(stage, labels)
            spacing *= each.cells + 1
        knot, beyond = self.axes[stage].at(self.accuracy_weight * labels.value)
        place = place + spacing * knot
        reach = self.reach[stage].ravel()
        low = reach[place]
        reached = low + beyond * (reach[place + spacing] - low)
        return np.asarray(reached - self.prices.of(labels.cost, labels.flow_seconds, labels.uses))


def resource_bound(
    program: Program, arrays: ProgramArrays, best: Prices, resources: Sequence[Resource]
) -> ResourceBound:
    """Build the bounds of all suffixes, last stage first, at the best prices found with all resources priced."""
    prices = best.at(0.0, *resources)
    discretizations = [discretize(program, arrays, resource, CELLS[len(resources)]) for resource in resources]
    accuracy_weight = program.weights.accuracy + prices.floor
    least, most = accuracy_weight * arrays.span
    axes = [_Axis(low, max(high - low, 1e-12) / (KNOTS - 1)) for low, high in zip(least, most, strict=True)]
    behind = axes[-1].knots() + prices.unused(program, arrays.limits)
    shape = (KNOTS, *(each.cells + 1 for each in discretizations))
    parts = [np.broadcast_to(behind.reshape(-1, *(1 for _ in discretizations)), shape).copy()]
    for k, (column, share) in reversed(list(enumerate(zip(arrays.columns, arrays.flow, strict=True)))):
        filled = np.array([each.filled(k) for each in discretizations])
        priced = prices.of(column.cost, share * column.seconds, column.uses)
        kept = undominated([priced, -column.value, *filled])
        values_weighted, value = axes[k].knots(), column.value[kept, None]
        after = value * values_weighted if arrays.is_product else accuracy_weight * value + values_weighted
        parts.append(
            _before(parts[-1], *axes[k + 1].at(after), filled[:, kept].T.astype(np.intp).tolist(), priced[kept])
        )
    return ResourceBound(discretizations, prices, accuracy_weight, axes, parts[::-1])


def _before(
    rest: Floats, knot: NDArray[np.intp], beyond: Floats, filled: Sequence[Sequence[int]], priced: Floats
) -> Floats:
    """The reach before a stage, [knots, cells left, …], from that after it: the best of its options.

    `knot` and `beyond` have shape [options, knots]: the knot below the value after the option, and the distance beyond
    it. `filled` and `priced` have shape [options]: cells of each resource, and priced cost.
    """
    more = (1,) * (rest.ndim - 1)
    rise, best = rest[1:] - rest[:-1], np.full(rest.shape, _NEVER)
    for start in range(0, len(filled), _BLOCK):
        block = slice(start, start + _BLOCK)
        by_option = rise[knot[block]]
        by_option *= beyond[block].reshape(-1, rest.shape[0], *more)
        by_option += rest[knot[block]]
        by_option -= priced[block].reshape(-1, 1, *more)
        for reached, cells in zip(by_option, filled[block], strict=True):
            # A label with at least these cells left continues with the remaining ones.
            to = (slice(taken, None) for taken in cells)
            of = (slice(None, max(0, size - taken)) for taken, size in zip(cells, rest.shape[1:], strict=True))
            left = best[(slice(None), *to)]
            np.maximum(left, reached[(slice(None), *of)], out=left)
    return best
