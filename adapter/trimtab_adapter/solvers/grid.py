"""An upper bound on every completion for what a partial choice has left of one resource, on a coarse grid. Pure numpy.

Prices (`envelope`) know one rate of exchange between seconds and accuracy for all labels; one that has spent much so
far cannot reach what they promise. Here one resource, the seconds of the SLO or the cores of the budget, is counted
instead: what is left, in whole cells, each option taking the whole cells that it surely fills. So no completion is
counted out (a relaxed knapsack). The other resource and the floor stay priced. The second axis is the value so far:
what completions reach is convex in it, so chords between a few knots bound it from above.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.program import TOLERANCE, Program
from trimtab_adapter.solvers.envelope import Prices, span
from trimtab_adapter.solvers.labels import Floats, Labels
from trimtab_adapter.solvers.table import Table

Resource = Literal["second", "core"]
CELLS = 128
KNOTS = 8
_NEVER = -1e30  # what cannot be completed reaches; finite, so that chords stay numbers
_ROUNDING = 1e-9  # of a cell


@dataclass(frozen=True, slots=True)
class _Axis:
    """The worths of prefixes, α + ν times their value, at which a stage's reach is known; evenly apart."""

    least: float
    apart: float

    def at(self, worths: Floats) -> tuple[NDArray[np.intp], Floats]:
        """Return the knot below each worth, and how far it is to the next, from 0 to 1."""
        place = np.minimum(np.maximum((worths - self.least) / self.apart, 0.0), KNOTS - 1.0)
        knot = np.minimum(place.astype(np.intp), KNOTS - 2)
        return knot, np.asarray(place - knot)

    def knots(self) -> Floats:
        """Return the worth of each knot."""
        return np.asarray(self.least + self.apart * np.arange(KNOTS))


@dataclass(frozen=True, slots=True)
class Grid:
    """Bounds that count one resource and price the rest."""

    resource: Resource
    prices: Prices  # none of the resource counted
    worth: float  # α + ν
    total: float  # of the resource
    axes: Sequence[_Axis]  # before each stage, and behind the last
    reach: Sequence[Floats]  # the most that the stages from k on add, of shape [knots, cells left]

    def bound(self, stage: int, labels: Labels) -> Floats:
        """Return the most that labels of the stages before `stage` can reach, of shape [labels]."""
        spent = labels.flow_seconds if self.resource == "second" else labels.cores
        left = (self.total - spent) * (
            CELLS / self.total
        ) + _ROUNDING  # from 0 to CELLS, since labels keep the constraints
        knot, beyond = self.axes[stage].at(self.worth * labels.value)
        place = knot * (CELLS + 1) + left.astype(np.intp)
        reach = self.reach[stage].ravel()
        low = reach[place]
        reached = low + beyond * (reach[place + CELLS + 1] - low)
        return np.asarray(reached - self.prices.of(labels.cost, labels.flow_seconds, labels.cores))


def count(program: Program, table: Table, best: Prices, resource: Resource) -> Grid:
    """Build the bounds of all suffixes, last stage first, at the prices that are best where all is priced."""
    prices = replace(best, **{resource: 0.0})
    worth = program.weights.accuracy + prices.floor
    total = (program.slo_seconds if resource == "second" else program.cores) + TOLERANCE
    axes = _axes(worth, [column.value for column in table.columns], is_product=table.is_product)
    behind = axes[-1].knots() + prices.unused(program)
    built = [np.repeat(behind[:, None], CELLS + 1, axis=1)]
    for k, (column, share) in reversed(list(enumerate(zip(table.columns, table.flow, strict=True)))):
        worths = axes[k].knots()
        after = column.value[:, None] * worths if table.is_product else worth * column.value[:, None] + worths
        used = share * column.seconds if resource == "second" else column.cores
        filled = np.minimum(used * (CELLS / total) * (1 - _ROUNDING), CELLS + 1.0).astype(np.intp)
        priced = prices.of(column.cost, share * column.seconds, column.cores)
        built.append(_before(built[-1], *axes[k + 1].at(after), filled.tolist(), priced))
    return Grid(resource, prices, worth, total, axes, built[::-1])


def _before(rest: Floats, knot: NDArray[np.intp], beyond: Floats, filled: Sequence[int], priced: Floats) -> Floats:
    """Return the reach before a stage, [knots, cells left], of what it is behind: the best of its options.

    Of shape [options, knots]: the knot below the worth behind, and how far beyond it is; [options]: cells, priced cost.
    """
    low, by_option = rest[knot], rest[knot + 1]
    by_option -= low
    by_option *= beyond[:, :, None]
    by_option += low
    by_option -= priced[:, None, None]
    best = np.full(rest.shape, _NEVER)
    for reached, cells in zip(by_option, filled, strict=True):
        if cells <= CELLS:
            np.maximum(best[:, cells:], reached[:, : CELLS + 1 - cells], out=best[:, cells:])
    return best


def _axes(worth: float, values: Sequence[Floats], *, is_product: bool) -> list[_Axis]:
    least, most = span(worth, values, is_product=is_product)
    return [_Axis(low, max(high - low, 1e-12) / (KNOTS - 1)) for low, high in zip(least, most, strict=True)]
