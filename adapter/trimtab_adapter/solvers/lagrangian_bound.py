"""Lagrangian bound: an upper bound on every completion of a partial choice, for given prices of latency and resources.

With prices λ of a second, μ of a unit of each limited resource and ν of accuracy above the floor, a completion with
accuracy V and priced cost C extends a prefix of accuracy v to (α+ν)·v·V − C: a line in v. Per suffix of stages the
upper envelope of these lines is sufficient (outer lines stay outer when a stage is prepended), and it is short.
Envelopes have a handful of lines, for which plain floats and tuples are faster than arrays.

Any prices ≥ 0 give a valid bound; good prices make it tight, which leaves fewer labels. The bound is convex in each
price, and the negative excess of its choice over the constraint is its slope. Between a price too low and one too high,
the two tangents meet where the best one may be (Kelley 1960); each price is searched in turn. The choices met on the
way are often feasible and good, so they are kept as guesses.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from operator import itemgetter
from typing import Any

import numpy as np

from trimtab_adapter.solvers.option_table import Floats
from trimtab_adapter.solvers.program import Program
from trimtab_adapter.solvers.program_arrays import Labels, ProgramArrays, Resource

# One line: slope, intercept, the option picked in the first stage, and the line of the remaining stages (None after
# the last one). A plain tuple, since a solve creates thousands.
Line = tuple[float, float, int, Any]
Lines = list[Line]
"""Slopes rising, intercepts falling."""
_SLOPE = itemgetter(0)


@dataclass(frozen=True, slots=True)
class Prices:
    """Lagrange multipliers: of the SLO per second, of each limit, of the accuracy floor per 1.0."""

    limits: tuple[float, ...]
    second: float = 0.0
    floor: float = 0.0

    def __getitem__(self, resource: Resource) -> float:
        return self.limits[resource] if isinstance(resource, int) else float(getattr(self, resource))

    def at(self, price: float, *resources: Resource) -> "Prices":
        """The same prices, with another one of some resources."""
        named = {name: price for name in resources if isinstance(name, str)}
        return replace(self, limits=tuple(price if n in resources else p for n, p in enumerate(self.limits)), **named)

    def of(self, cost: Floats, seconds: Floats, uses: Floats) -> Floats:
        """Priced costs; `uses` has shape [limits, costs]."""
        priced = cost + self.second * seconds
        for price, used in zip(self.limits, uses, strict=True):
            if price:
                priced += price * used
        return priced

    def unused(self, program: Program, limits: Sequence[float]) -> float:
        """The price of the whole SLO, limits and floor, with which each bound begins."""
        seconds = self.second * program.slo_seconds if self.second else 0.0  # of an infinite SLO, 0 · ∞ is NaN
        bounded = sum(price * limit for price, limit in zip(self.limits, limits, strict=True))
        return seconds + bounded - self.floor * program.accuracy_floor


@dataclass(frozen=True, slots=True)
class LagrangianBounds:
    """Bounds for one set of prices."""

    prices: Prices
    accuracy_weight: float
    """α + ν."""
    suffixes: Sequence[Lines]
    """Of the stages from k on."""
    is_product: bool

    def bound(self, stage: int, labels: Labels) -> Floats:
        """The most that labels of the stages before `stage` can reach, of shape [labels]."""
        lines = self.suffixes[stage]
        accuracy_weight = self.accuracy_weight * labels.value
        priced_costs = self.prices.of(labels.cost, labels.flow_seconds, labels.uses)
        if not self.is_product:
            return np.asarray(accuracy_weight + lines[0][1] - priced_costs)
        best = np.full_like(accuracy_weight, -np.inf)
        for slope, intercept, *_ in lines:
            np.maximum(best, slope * accuracy_weight + intercept, out=best)
        return np.asarray(best - priced_costs)

    def greedy(self) -> tuple[list[int], float]:
        """The choice that reaches the bound at the root, and the bound."""
        at = self.accuracy_weight if self.is_product else 0.0
        slope, intercept, pick, rest = max(self.suffixes[0], key=lambda line: line[0] * at + line[1])
        bound, picks = slope * at + intercept, []
        while rest is not None:
            picks.append(pick)
            *_, pick, rest = rest
        return picks, bound


def suffixes(
    accuracy_weight: float, priced: Sequence[Floats], arrays: ProgramArrays, unused: float
) -> tuple[Lines, ...]:
    """Build the envelopes of all suffixes, last stage first; each bound begins with what is `unused`."""
    least, most = (accuracy_weight * arrays.span).tolist()
    lines: Lines = [(1.0, unused, -1, None)]
    parts = [lines]
    for k in reversed(range(len(priced))):
        value = arrays.columns[k].value
        if arrays.is_product:
            # An option that is nowhere highest before any of the suffix's lines is nowhere highest with it.
            options = _upper(_falling(value, -priced[k]), least[k] * lines[0][0], most[k] * lines[-1][0])
            put_before = [
                (factor * line[0], gain + line[1], pick, line) for factor, gain, pick, _ in options for line in lines
            ]
            lines = _upper(put_before, least[k], most[k])
        else:
            reach = accuracy_weight * value - priced[k]
            pick = int(reach.argmax())
            lines = [(1.0, lines[0][1] + float(reach[pick]), pick, lines[0])]
        parts.append(lines)
    return tuple(reversed(parts))


def _falling(slopes: Floats, intercepts: Floats) -> Lines:
    """Lines of options by rising slope, but those below a steeper one that starts as high."""
    later = np.maximum.accumulate(intercepts[::-1])[::-1]
    kept = np.append(intercepts[:-1] > later[1:], True).nonzero()[0]
    return list(zip(slopes[kept].tolist(), intercepts[kept].tolist(), kept.tolist(), repeat(None)))


def _upper(lines: Lines, least: float, most: float) -> Lines:
    """Keep the lines that are highest somewhere between least and most."""
    kept: Lines = []
    starts: list[float] = []  # from where on each kept line is the highest
    for line in sorted(lines, key=_SLOPE):
        start = least
        while kept:
            last = kept[-1]
            drop = last[1] - line[1]
            if drop > 0.0:
                rise = line[0] - last[0]
                start = drop / rise if rise > 0.0 else math.inf
                if start > starts[-1]:
                    break
            kept.pop()
            starts.pop()
            start = least
        if not kept or start < most:
            kept.append(line)
            starts.append(start)
    return kept


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
    excess: Mapping[Resource, float]

    def price(self, resource: Resource) -> float:
        return self.bounds.prices[resource]


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
    resources: tuple[Resource, ...] = ("second", *reversed(range(len(arrays.limits))), "floor")
    for _ in range(2 if arrays.limits or program.accuracy_floor > 0 else 1):
        for resource in resources:
            if search.best.excess[resource] > 0 or search.best.price(resource) > 0:
                search.seek(resource)
    at_none = search.probes[0]
    return Multipliers(
        bounds=tuple(probe.bounds for probe in dict.fromkeys((search.best, at_none))),
        guesses=tuple(probe.picks for probe in search.probes),
        broken=tuple(name for name in resources if any(probe.excess[name] > 0 for probe in search.probes)),
    )


class _MultiplierSearch:
    """All probes so far, and the one with the lowest bound."""

    def __init__(self, program: Program, arrays: ProgramArrays) -> None:
        self._program, self._arrays = program, arrays
        self.best = _probe(program, arrays, Prices((0.0,) * len(arrays.limits)))
        self.probes = [self.best]

    def probe(self, resource: Resource, price: float) -> _Probe:
        """Set one price and keep the other best ones."""
        found = _probe(self._program, self._arrays, self.best.bounds.prices.at(price, resource))
        self.probes.append(found)
        if found.bound < self.best.bound:
            self.best = found
        return found

    def seek(self, resource: Resource) -> None:
        """Vary one price to lower the bound."""
        low, high = self._around(resource)
        for _ in range(TANGENTS):
            if low is None or high is None or high.excess[resource] >= 0:
                return
            # Tangents: bound − excess · (price − own price).
            low_excess, high_excess = low.excess[resource], high.excess[resource]
            rise = high.bound - low.bound + high_excess * high.price(resource) - low_excess * low.price(resource)
            price = rise / (high_excess - low_excess)
            hoped = low.bound - low_excess * (price - low.price(resource))
            if self.best.bound - hoped <= CLOSE * max(1.0, self._program.weights.accuracy):
                return
            found = self.probe(resource, price)
            low, high = (found, high) if found.excess[resource] > 0 else (low, found)

    def _around(self, resource: Resource) -> tuple[_Probe | None, _Probe | None]:
        """Find a price at which the constraint is violated, and one at which it is satisfied."""
        best = self.best
        if best.excess[resource] > 0:
            return best, self._raised(resource, 4.0 * best.price(resource))
        free = self.probe(resource, 0.0)
        return (free, best) if free.excess[resource] > 0 else (None, best)

    def _raised(self, resource: Resource, at_least: float) -> _Probe | None:
        """Find a price at which the constraint is satisfied."""
        weights, slo_seconds = self._program.weights, self._program.slo_seconds
        scale = max(weights.accuracy, weights.cost, 1e-6)
        price = max(at_least, scale / max(slo_seconds, 1e-6) if resource == "second" else scale)
        for _ in range(RAISES):
            found = self.probe(resource, price)
            if found.excess[resource] <= 0:
                return found
            price *= 4.0
        return None


def _probe(program: Program, arrays: ProgramArrays, prices: Prices) -> _Probe:
    priced = [
        prices.of(column.cost, share * column.seconds, column.uses)
        for column, share in zip(arrays.columns, arrays.flow, strict=True)
    ]
    accuracy_weight = program.weights.accuracy + prices.floor
    lines = suffixes(accuracy_weight, priced, arrays, prices.unused(program, arrays.limits))
    bounds = LagrangianBounds(prices, accuracy_weight, lines, arrays.is_product)
    picks, bound = bounds.greedy()
    picked = [column.value[pick] for column, pick in zip(arrays.columns, picks, strict=True)]
    value = float(np.prod(picked) if arrays.is_product else np.sum(picked))
    at = list(zip(arrays.columns, picks, arrays.flow, strict=True))
    excess: dict[Resource, float] = {
        "second": sum(share * float(column.seconds[pick]) for column, pick, share in at) - program.slo_seconds,
        "floor": program.accuracy_floor - value,
    }
    for n, limit in enumerate(arrays.limits):
        excess[n] = sum(float(column.uses[n, pick]) for column, pick, _ in at) - limit
    return _Probe(bounds, picks, bound, excess)
