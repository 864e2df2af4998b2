"""An upper bound on every completion of a partial choice, for chosen prices of latency and cores. Pure numpy.

With prices λ of a second, μ of a core and ν of accuracy above the floor, a completion with accuracy V and priced cost C
takes a prefix of accuracy v to (α+ν)·v·V − C: a line in v. Per suffix of stages the upper envelope of these lines is
enough (outer lines stay outer when a stage is put before them), and it is short. Any prices ≥ 0 give a valid bound
(Lagrange); good prices make it tight. Envelopes have a handful of lines: plain floats are faster here than arrays.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Line(NamedTuple):
    """What completions like the one it stands for reach, slope·x + intercept; `rest` is its line without this stage."""

    slope: float
    intercept: float
    pick: int = -1
    rest: Any = None  # a Line, or None behind the last stage


Lines = list[Line]  # slopes rising, intercepts falling
_SLOPE = itemgetter(0)


@dataclass(frozen=True, slots=True)
class Prices:
    """Lagrange multipliers: of the SLO, per second; of the budget, per core; of the accuracy floor, per 1.0."""

    second: float = 0.0
    core: float = 0.0
    floor: float = 0.0


@dataclass(frozen=True, slots=True)
class Envelopes:
    """Bounds for one set of prices."""

    prices: Prices
    worth: float  # α + ν
    suffixes: Sequence[Lines]  # of the stages from k on
    is_product: bool

    def bound(self, stage: int, values: Floats, priced_costs: Floats) -> Floats:
        """Return the most that labels of the stages before `stage` can reach; both arrays have shape [labels]."""
        lines = self.suffixes[stage]
        worth = self.worth * values
        if not self.is_product:
            return np.asarray(worth + lines[0].intercept - priced_costs)
        best = lines[0].slope * worth + lines[0].intercept
        for line in lines[1:]:
            np.maximum(best, line.slope * worth + line.intercept, out=best)
        return np.asarray(best - priced_costs)

    def greedy(self) -> tuple[list[int], float]:
        """Return the choice that reaches the bound at the root, and the bound."""
        at = self.worth if self.is_product else 0.0
        line = max(self.suffixes[0], key=lambda each: each.slope * at + each.intercept)
        bound, picks = line.slope * at + line.intercept, []
        while line.rest is not None:
            picks.append(line.pick)
            line = line.rest
        return picks, bound


def suffixes(
    worth: float, priced: Sequence[Floats], values: Sequence[Floats], unused: float, *, is_product: bool
) -> tuple[Lines, ...]:
    """Build the envelopes of all suffixes, last stage first.

    `unused` is what the whole SLO, budget and floor are worth at the prices: each bound begins with it.
    """
    most = np.cumprod([1.0, *(value.max() for value in values)]) * worth  # greatest prefix before each stage
    lines = [Line(1.0, unused)]
    built = [lines]
    for k in reversed(range(len(values))):
        if is_product:
            # An option that is nowhere highest here is nowhere highest before any suffix.
            options = _upper(list(map(Line, values[k].tolist(), (-priced[k]).tolist(), range(priced[k].size))))
            put_before = [
                Line(option.slope * line.slope, line.intercept + option.intercept, option.pick, line)
                for option in options
                for line in lines
            ]
            lines = _upper(put_before, float(most[k]))
        else:
            reach = worth * values[k] - priced[k]
            pick = int(reach.argmax())
            lines = [Line(1.0, lines[0].intercept + float(reach[pick]), pick, lines[0])]
        built.append(lines)
    return tuple(reversed(built))


def _upper(lines: Lines, most: float = math.inf) -> Lines:
    """Keep the lines that are highest somewhere on 0…most."""
    kept: Lines = []
    starts: list[float] = []  # from where on each kept line is the highest
    for line in sorted(lines, key=_SLOPE):
        slope, intercept, start = line[0], line[1], 0.0
        while kept:
            last_slope, last_intercept = kept[-1][:2]
            rise = slope - last_slope
            start = (last_intercept - intercept) / rise if rise > 0.0 else math.inf
            if intercept < last_intercept and start > starts[-1]:
                break
            kept.pop()
            starts.pop()
            start = 0.0
        if not kept or start < most:
            kept.append(line)
            starts.append(start)
    return kept
