"""Lagrangian bound: an upper bound on every completion of a partial choice, for given prices of latency and resources.

With prices λ of a second, μ of a core and ν of accuracy above the floor, a completion with accuracy V and priced cost C
extends a prefix of accuracy v to (α+ν)·v·V − C: a line in v. Per suffix of stages the upper envelope of these lines is
sufficient (outer lines stay outer when a stage is prepended), and it is short. Any prices ≥ 0 give a valid bound; good
prices make it tight. Envelopes have a handful of lines, for which plain floats and tuples are faster than arrays.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np

from trimtab_adapter.solvers.labels import Labels
from trimtab_adapter.solvers.program import Program
from trimtab_adapter.solvers.program_arrays import Floats

Amount = TypeVar("Amount", float, Floats)

# One line: slope, intercept, the option picked in the first stage, and the line of the remaining stages (None after
# the last one). A plain tuple, since a solve creates thousands.
Line = tuple[float, float, int, Any]
Lines = list[Line]
"""Slopes rising, intercepts falling."""
_SLOPE = itemgetter(0)
_ROUNDING = 1e-9
"""By how much a product of accuracies is taken to be off."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Lagrange multipliers: of the SLO per second, of the budget per core and GPU, of the accuracy floor per 1.0."""

    second: float = 0.0
    core: float = 0.0
    gpu: float = 0.0
    floor: float = 0.0

    def of(self, cost: Amount, seconds: Amount, cores: Amount, gpus: Amount) -> Amount:
        """A cost plus the priced seconds, cores and GPUs."""
        priced = cost + self.second * seconds + self.core * cores
        return priced + self.gpu * gpus if self.gpu else priced

    def unused(self, program: Program) -> float:
        """The price of the whole SLO, budget and floor, with which each bound begins."""
        # An SLO or budget may be infinite; then its price is 0, and 0 · ∞ would be NaN.
        seconds = self.second * program.slo_seconds if self.second else 0.0
        cores = self.core * program.cores if self.core else 0.0
        return seconds + cores + self.gpu * program.gpus - self.floor * program.accuracy_floor


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
        priced_costs = self.prices.of(labels.cost, labels.flow_seconds, labels.cores, labels.gpus)
        if not self.is_product:
            return np.asarray(accuracy_weight + lines[0][1] - priced_costs)
        best = np.full_like(accuracy_weight, -np.inf)
        for slope, intercept, *_ in lines:
            np.maximum(best, slope * accuracy_weight + intercept, out=best)
        return np.asarray(best - priced_costs)

    def greedy(self) -> tuple[list[int], float]:
        """The choice that reaches the bound at the root, and the bound."""
        at = self.accuracy_weight if self.is_product else 0.0
        slope, intercept, pin_extreme, rest = max(self.suffixes[0], key=lambda line: line[0] * at + line[1])
        bound, picks = slope * at + intercept, []
        while rest is not None:
            picks.append(pin_extreme)
            *_, pin_extreme, rest = rest
        return picks, bound


def suffixes(
    accuracy_weight: float, priced: Sequence[Floats], values: Sequence[Floats], unused: float, *, is_product: bool
) -> tuple[Lines, ...]:
    """Build the envelopes of all suffixes, last stage first; each bound begins with what is `unused`."""
    least, most = span(accuracy_weight, values, is_product=is_product)
    lines: Lines = [(1.0, unused, -1, None)]
    parts = [lines]
    for k in reversed(range(len(values))):
        if is_product:
            own = list(zip(values[k].tolist(), (-priced[k]).tolist(), range(priced[k].size), repeat(None)))
            # An option that is nowhere highest before any of the suffix's lines is nowhere highest with it.
            options = _upper(own, least[k] * lines[0][0], most[k] * lines[-1][0])
            put_before = [
                (value * line[0], gain + line[1], pin_extreme, line)
                for value, gain, pin_extreme, _ in options
                for line in lines
            ]
            lines = _upper(put_before, least[k], most[k])
        else:
            reach = accuracy_weight * values[k] - priced[k]
            pin_extreme = int(reach.argmax())
            lines = [(1.0, lines[0][1] + float(reach[pin_extreme]), pin_extreme, lines[0])]
        parts.append(lines)
    return tuple(reversed(parts))


def span(accuracy_weight: float, values: Sequence[Floats], *, is_product: bool) -> tuple[list[float], list[float]]:
    """The least and the greatest value that prefixes before each stage can have, rounding included."""
    if is_product:
        least = np.cumprod([accuracy_weight, *(value.min() for value in values)])
        most = np.cumprod([accuracy_weight, *(value.max() for value in values)])
    else:
        least = accuracy_weight * np.cumsum([0.0, *(value.min() for value in values)])
        most = accuracy_weight * np.cumsum([0.0, *(value.max() for value in values)])
    return (least * (1 - _ROUNDING)).tolist(), (most * (1 + _ROUNDING)).tolist()


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
