"""Lagrange multipliers of latency, cores, GPUs and accuracy that make the bound at the root tight.

A tighter bound leaves fewer labels. The bound is convex in each multiplier, and the negative excess of its choice over
the constraint is its slope. Between a multiplier too low and one too high, the two tangents meet where the best one may
be (Kelley 1960); each multiplier is searched in turn. The choices met on the way are often feasible and good, so they
are kept as guesses.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from trimtab_adapter.solvers.discretization import Resource
from trimtab_adapter.solvers.lagrangian_bound import LagrangianBounds, Prices, suffixes
from trimtab_adapter.solvers.program import Program
from trimtab_adapter.solvers.program_arrays import ProgramArrays

RAISES = 30
TANGENTS = 4
CLOSE = 1e-3
"""Of the objective's scale: a price that can lower the bound by no more is refined no further."""


@dataclass(frozen=True, slots=True, eq=False)
class _Probe:
    """The bound at some prices, and the excess of its choice over each constraint."""

    bounds: LagrangianBounds
    picks: list[int]
    bound: float
    seconds_over: float
    cores_over: float
    gpus_over: float
    value_short: float


@dataclass(frozen=True, slots=True)
class Multipliers:
    """The best Lagrange multipliers found, and the choices met on the way."""

    bounds: tuple[LagrangianBounds, ...]
    """At the best prices first, then at none."""
    guesses: tuple[list[int], ...]
    """Choices met on the way, often feasible and good."""
    broken: tuple[Resource, ...]
    """The constraints that some of these violate."""


def optimize_multipliers(program: Program, arrays: ProgramArrays) -> Multipliers:
    """Find prices at which the bound at the root is low."""
    search = _MultiplierSearch(program, arrays)
    for _ in range(2 if arrays.cores_bind or arrays.gpus_bind or program.accuracy_floor > 0 else 1):
        for name, excess in _CONSTRAINTS:
            if excess(search.best) > 0 or _price(search.best, name) > 0:
                search.seek(name, excess)
    at_none = search.probes[0]
    return Multipliers(
        bounds=tuple(probe.bounds for probe in dict.fromkeys((search.best, at_none))),
        guesses=tuple(probe.picks for probe in search.probes),
        broken=tuple(name for name, excess in _CONSTRAINTS if any(excess(probe) > 0 for probe in search.probes)),
    )


_CONSTRAINTS: tuple[tuple[Resource, Callable[[_Probe], float]], ...] = (
    ("second", lambda probe: probe.seconds_over),
    ("gpu", lambda probe: probe.gpus_over),
    ("core", lambda probe: probe.cores_over),
    ("floor", lambda probe: probe.value_short),
)


class _MultiplierSearch:
    """All probes so far, and the one with the lowest bound."""

    def __init__(self, program: Program, arrays: ProgramArrays) -> None:
        self._program, self._table = program, arrays
        self.best = _probe(program, arrays, Prices())
        self.probes = [self.best]

    def probe(self, name: str, at: float) -> _Probe:
        """Set one price and keep the other best ones."""
        found = _probe(self._program, self._table, replace(self.best.bounds.prices, **{name: at}))
        self.probes.append(found)
        if found.bound < self.best.bound:
            self.best = found
        return found

    def seek(self, name: str, excess: Callable[[_Probe], float]) -> None:
        """Vary one price to lower the bound."""
        low, high = self._around(name, excess)
        for _ in range(TANGENTS):
            if low is None or high is None or excess(high) >= 0:
                return
            # Tangents: bound − excess · (price − own price).
            rise = high.bound - low.bound + excess(high) * _price(high, name) - excess(low) * _price(low, name)
            at = rise / (excess(high) - excess(low))
            hoped = low.bound - excess(low) * (at - _price(low, name))
            if self.best.bound - hoped <= CLOSE * max(1.0, self._program.weights.accuracy):
                return
            found = self.probe(name, at)
            low, high = (found, high) if excess(found) > 0 else (low, found)

    def _around(self, name: str, excess: Callable[[_Probe], float]) -> tuple[_Probe | None, _Probe | None]:
        """Find a price at which the constraint is violated, and one at which it is satisfied."""
        best = self.best
        if excess(best) > 0:
            return best, self._raised(name, excess, max(4.0 * _price(best, name), _first_price(self._program, name)))
        free = self.probe(name, 0.0)
        return (free, best) if excess(free) > 0 else (None, best)

    def _raised(self, name: str, excess: Callable[[_Probe], float], price: float) -> _Probe | None:
        """Find a price at which the constraint is satisfied."""
        for _ in range(RAISES):
            found = self.probe(name, price)
            if excess(found) <= 0:
                return found
            price *= 4.0
        return None


def _price(probe: _Probe, name: str) -> float:
    return float(getattr(probe.bounds.prices, name))


def _first_price(program: Program, name: str) -> float:
    scale = max(program.weights.accuracy, program.weights.core, 1e-6)
    return scale / max(program.slo_seconds, 1e-6) if name == "second" else scale


def _probe(program: Program, arrays: ProgramArrays, prices: Prices) -> _Probe:
    priced = [
        prices.of(column.cost, share * column.seconds, column.cores, column.gpus)
        for column, share in zip(arrays.columns, arrays.flow, strict=True)
    ]
    values = [column.value for column in arrays.columns]
    accuracy_weight = program.weights.accuracy + prices.floor
    lines = suffixes(accuracy_weight, priced, values, prices.unused(program), is_product=arrays.is_product)
    bounds = LagrangianBounds(prices, accuracy_weight, lines, arrays.is_product)
    picks, bound = bounds.greedy()
    picked = [column.value[pin_extreme] for column, pin_extreme in zip(arrays.columns, picks, strict=True)]
    value = float(np.prod(picked) if arrays.is_product else np.sum(picked))
    at = list(zip(arrays.columns, picks, arrays.flow, strict=True))
    return _Probe(
        bounds,
        picks,
        bound,
        seconds_over=sum(share * float(column.seconds[pin_extreme]) for column, pin_extreme, share in at)
        - program.slo_seconds,
        cores_over=sum(float(column.cores[pin_extreme]) for column, pin_extreme, _ in at) - program.cores,
        gpus_over=sum(float(column.gpus[pin_extreme]) for column, pin_extreme, _ in at) - program.gpus,
        value_short=program.accuracy_floor - value,
    )
