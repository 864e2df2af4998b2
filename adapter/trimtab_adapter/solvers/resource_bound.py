"""An upper bound on every completion for what a partial choice has left of one resource or two, on a coarse grid.

Prices (`envelope`) know one rate of exchange between seconds and accuracy for all labels; one that has spent much so
far cannot reach what they promise. Here the resource, or two of them, are counted instead: what is left, in whole
cells, each option taking the whole cells that it surely fills. So no completion is counted out (a relaxed knapsack).
What is not counted stays priced. The first axis is the value so far: what completions reach is convex in it, so chords
between a few knots bound it from above. Pure numpy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.solvers.discretization import Discretization, Resource, discretize
from trimtab_adapter.solvers.labels import Labels
from trimtab_adapter.solvers.lagrangian_bound import Prices, span
from trimtab_adapter.solvers.program import Program
from trimtab_adapter.solvers.program_arrays import Floats, ProgramArrays

KNOTS = 6
CELLS = {1: 128, 2: 32}  # of each resource, by how many are counted
MOST_COUNTED = max(CELLS)
_NEVER = -1e30  # bound of a label without completion; finite, so that interpolation does not give NaN


@dataclass(frozen=True, slots=True)
class _Axis:
    """The worths of prefixes, α + ν times their value, at which a stage's reach is known; evenly apart."""

    least: float
    apart: float

    def at(self, worths: Floats) -> tuple[NDArray[np.intp], Floats]:
        """The knot below each worth, and how far it is to the next, from 0 to 1."""
        place = np.minimum(np.maximum((worths - self.least) / self.apart, 0.0), KNOTS - 1.0)
        knot = np.minimum(place.astype(np.intp), KNOTS - 2)
        return knot, np.asarray(place - knot)

    def knots(self) -> Floats:
        """The worth of each knot."""
        return np.asarray(self.least + self.apart * np.arange(KNOTS))


@dataclass(frozen=True, slots=True)
class ResourceBound:
    """Bounds that count one resource or two and price the rest."""

    meters: Sequence[Discretization]
    prices: Prices  # none of what is counted
    worth: float  # α + ν
    axes: Sequence[_Axis]  # before each stage, and behind the last
    reach: Sequence[Floats]  # the most that the stages from k on add, of shape [knots, cells left, …]

    def bound(self, stage: int, labels: Labels) -> Floats:
        """The most that labels of the stages before `stage` can reach, of shape [labels]."""
        place, apart = np.zeros(1, dtype=np.intp), 1
        for each in reversed(self.meters):
            place = place + apart * each.left(stage, labels)
            apart *= each.cells + 1
        knot, beyond = self.axes[stage].at(self.worth * labels.value)
        place = place + apart * knot
        reach = self.reach[stage].ravel()
        low = reach[place]
        reached = low + beyond * (reach[place + apart] - low)
        return np.asarray(reached - self.prices.of(labels.cost, labels.flow_seconds, labels.cores, labels.gpus))


def count(program: Program, table: ProgramArrays, best: Prices, resources: Sequence[Resource]) -> ResourceBound:
    """Build the bounds of all suffixes, last stage first, at the prices that are best where all is priced."""
    prices = replace(best, **dict.fromkeys(resources, 0.0))
    meters = [discretize(program, table, resource, CELLS[len(resources)]) for resource in resources]
    worth = program.weights.accuracy + prices.floor
    axes = _axes(worth, [column.value for column in table.columns], is_product=table.is_product)
    behind = axes[-1].knots() + prices.unused(program)
    shape = (KNOTS, *(each.cells + 1 for each in meters))
    built = [np.broadcast_to(behind.reshape(-1, *(1 for _ in meters)), shape).copy()]
    for k, (column, share) in reversed(list(enumerate(zip(table.columns, table.flow, strict=True)))):
        worths = axes[k].knots()
        after = column.value[:, None] * worths if table.is_product else worth * column.value[:, None] + worths
        filled = list(zip(*(each.filled(k) for each in meters), strict=True))
        priced = prices.of(column.cost, share * column.seconds, column.cores, column.gpus)
        built.append(_before(built[-1], *axes[k + 1].at(after), filled, priced))
    return ResourceBound(meters, prices, worth, axes, built[::-1])


def _before(
    rest: Floats, knot: NDArray[np.intp], beyond: Floats, filled: Sequence[tuple[int, ...]], priced: Floats
) -> Floats:
    """The reach before a stage, [knots, cells left, …], of what it is behind: the best of its options.

    Of shape [options, knots]: the knot below the worth behind, and how far beyond it is; [options]: cells of each
    resource, priced cost.
    """
    more = (1,) * (rest.ndim - 1)
    low, by_option = rest[knot], rest[knot + 1]
    by_option -= low
    by_option *= beyond.reshape(*beyond.shape, *more)
    by_option += low
    by_option -= priced.reshape(-1, 1, *more)
    best = np.full(rest.shape, _NEVER)
    for reached, cells in zip(by_option, filled, strict=True):
        # Who has these cells left or more gets there with what remains of them.
        to = (slice(None), *(slice(taken, None) for taken in cells))
        of = (
            slice(None),
            *(slice(None, max(0, size - taken)) for taken, size in zip(cells, rest.shape[1:], strict=True)),
        )
        np.maximum(best[to], reached[of], out=best[to])
    return best


def _axes(worth: float, values: Sequence[Floats], *, is_product: bool) -> list[_Axis]:
    least, most = span(worth, values, is_product=is_product)
    return [_Axis(low, max(high - low, 1e-12) / (KNOTS - 1)) for low, high in zip(least, most, strict=True)]
