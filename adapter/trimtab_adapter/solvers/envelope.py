"""An upper bound on every completion of a partial choice, for chosen prices of latency and cores. Pure numpy.

With prices λ of a second, μ of a core and ν of accuracy above the floor, a completion with accuracy V and priced cost C
takes a prefix of accuracy v to (α+ν)·v·V − C: a line in v. Per suffix of stages the upper envelope of these lines is
enough (outer lines stay outer when a stage is put before them), and it is short. Any prices ≥ 0 give a valid bound
(Lagrange); good prices make it tight.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Lines = tuple[Floats, Floats]  # slopes rising, intercepts falling


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
    priced: Sequence[Floats]  # cost of each option of each stage, at these prices
    suffixes: Sequence[Lines]  # of the stages from k on
    is_product: bool

    def bound(self, stage: int, values: Floats, priced_costs: Floats) -> Floats:
        """Return the most that labels of the stages before `stage` can reach; both arrays have shape [labels]."""
        slopes, intercepts = self.suffixes[stage]
        worth = self.worth * values
        if not self.is_product:
            return np.asarray(worth + intercepts[0] - priced_costs)
        best = slopes[0] * worth + intercepts[0]
        for slope, intercept in zip(slopes[1:], intercepts[1:], strict=True):
            np.maximum(best, slope * worth + intercept, out=best)
        return np.asarray(best - priced_costs)

    def greedy(self, values: Sequence[Floats]) -> tuple[list[int], float]:
        """Return the choice that reaches the bound at the root, and the bound. `values[k]` has shape [options of k]."""
        worth = self.worth if self.is_product else 0.0
        choice: list[int] = []
        for k, value in enumerate(values):
            slopes, intercepts = self.suffixes[k + 1]
            if self.is_product:
                reach = (worth * value[:, None] * slopes + intercepts).max(axis=1) - self.priced[k]
            else:
                reach = self.worth * value - self.priced[k]
            choice.append(int(reach.argmax()))
            worth *= float(value[choice[-1]])
        slopes, intercepts = self.suffixes[0]
        return choice, float((slopes * (self.worth if self.is_product else 0.0) + intercepts).max())


def suffixes(
    worth: float, priced: Sequence[Floats], values: Sequence[Floats], unused: float, *, is_product: bool
) -> tuple[Lines, ...]:
    """Build the envelopes of all suffixes, last stage first.

    `unused` is what the whole SLO, budget and floor are worth at the prices: each bound begins with it.
    """
    most = np.cumprod([1.0, *(value.max() for value in values)]) * worth  # greatest prefix before each stage
    lines: Lines = (np.ones(1), np.full(1, unused))
    built = [lines]
    for k in reversed(range(len(values))):
        if is_product:
            slopes = (values[k][:, None] * lines[0]).ravel()
            intercepts = (lines[1] - priced[k][:, None]).ravel()
            lines = _upper(slopes, intercepts, float(most[k]))
        else:
            lines = (np.ones(1), lines[1] + (worth * values[k] - priced[k]).max())
        built.append(lines)
    return tuple(reversed(built))


def _upper(slopes: Floats, intercepts: Floats, most: float) -> Lines:
    """Keep the lines that are highest somewhere on 0…most."""
    start = int(np.lexsort((slopes, intercepts))[-1])  # highest at 0
    kept_slopes, kept_intercepts = [float(slopes[start])], [float(intercepts[start])]
    at = 0.0
    while at < most:
        steeper = slopes > kept_slopes[-1]
        if not steeper.any():
            break
        rises, falls = slopes[steeper], intercepts[steeper]
        crossings = (kept_intercepts[-1] - falls) / (rises - kept_slopes[-1])
        first = crossings.min()
        if first >= most:
            break
        ties = crossings <= first
        pick = int(rises[ties].argmax())
        at = float(first)
        kept_slopes.append(float(rises[ties][pick]))
        kept_intercepts.append(float(falls[ties][pick]))
        slopes, intercepts = rises, falls
    return np.array(kept_slopes), np.array(kept_intercepts)
