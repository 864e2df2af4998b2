"""Good prices for latency, cores and accuracy: the tighter the bound at the root, the fewer labels the search keeps.

The bound is convex in the prices, and the choice that reaches it tells on which side of the best price one is: where
that choice breaks a constraint, its price must rise. So each price is bisected in turn. The choices met on the way
are often feasible and good, so they come along as guesses.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from trimtab_adapter.program import Program
from trimtab_adapter.solvers.envelope import Envelopes, Prices, suffixes
from trimtab_adapter.solvers.table import Table

FEW_CHOICES = 30_000  # so many are searched sooner than good prices are found
DOUBLINGS = 30
HALVINGS = 7


@dataclass(frozen=True, slots=True)
class _Probe:
    """The bound at some prices, and by how much the choice that reaches it exceeds each constraint."""

    envelopes: Envelopes
    picks: list[int]
    bound: float
    seconds_over: float
    cores_over: float
    value_short: float


def price(program: Program, table: Table) -> tuple[list[Envelopes], list[list[int]]]:
    """Return envelopes at the best prices found and at none, and the choices met on the way."""
    search = _Search(program, table)
    if math.prod(column.index.size for column in table.columns) <= FEW_CHOICES:
        return [search.best.envelopes], [search.best.picks]
    for _ in range(2 if table.cores_bind or program.accuracy_floor > 0 else 1):
        for name, excess in _CONSTRAINTS:
            if excess(search.best) > 0 or getattr(search.best.envelopes.prices, name) > 0:
                search.bisect(name, excess)
    chosen = [search.best.envelopes]
    if search.best is not search.probes[0]:
        chosen.append(search.probes[0].envelopes)
    return chosen, [probe.picks for probe in search.probes]


_CONSTRAINTS: tuple[tuple[str, Callable[[_Probe], float]], ...] = (
    ("second", lambda probe: probe.seconds_over),
    ("core", lambda probe: probe.cores_over),
    ("floor", lambda probe: probe.value_short),
)


class _Search:
    """All probes so far, and the one with the lowest bound."""

    def __init__(self, program: Program, table: Table) -> None:
        self._program, self._table = program, table
        self.best = _probe(program, table, Prices())
        self.probes = [self.best]

    def probe(self, name: str, at: float) -> _Probe:
        """Set one price beside the best others."""
        found = _probe(self._program, self._table, replace(self.best.envelopes.prices, **{name: at}))
        self.probes.append(found)
        if found.bound < self.best.bound:
            self.best = found
        return found

    def bisect(self, name: str, excess: Callable[[_Probe], float]) -> None:
        """Vary one price to lower the bound."""
        low, high = 0.0, max(getattr(self.best.envelopes.prices, name), _first_price(self._program, name))
        for _ in range(DOUBLINGS):
            if excess(self.probe(name, high)) <= 0:
                break
            low, high = high, high * 4.0
        for _ in range(HALVINGS):
            middle = (low * high) ** 0.5 if low > 0 else high / 4.0
            if excess(self.probe(name, middle)) > 0:
                low = middle
            else:
                high = middle


def _first_price(program: Program, name: str) -> float:
    scale = max(program.weights.accuracy, program.weights.core, 1e-6)
    return scale / max(program.slo_seconds, 1e-6) if name == "second" else scale


def _probe(program: Program, table: Table, prices: Prices) -> _Probe:
    priced = [
        column.cost + prices.second * share * column.seconds + prices.core * column.cores
        for column, share in zip(table.columns, table.flow, strict=True)
    ]
    # An SLO or budget may be infinite; then its price is 0 and 0 · ∞ would be no number.
    unused = prices.second * program.slo_seconds if prices.second else 0.0
    unused += prices.core * program.cores if prices.core else 0.0
    unused -= prices.floor * program.accuracy_floor
    values = [column.value for column in table.columns]
    worth = program.weights.accuracy + prices.floor
    lines = suffixes(worth, priced, values, unused, is_product=table.is_product)
    envelopes = Envelopes(prices, worth, priced, lines, table.is_product)
    picks, bound = envelopes.greedy(values)
    picked = [column.value[pick] for column, pick in zip(table.columns, picks, strict=True)]
    value = float(np.prod(picked) if table.is_product else np.sum(picked))
    at = list(zip(table.columns, picks, table.flow, strict=True))
    return _Probe(
        envelopes,
        picks,
        bound,
        seconds_over=sum(share * float(column.seconds[pick]) for column, pick, share in at) - program.slo_seconds,
        cores_over=sum(float(column.cores[pick]) for column, pick, _ in at) - program.cores,
        value_short=program.accuracy_floor - value,
    )
