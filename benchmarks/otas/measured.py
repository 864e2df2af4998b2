"""Results of one cell: a load with one method, simulated or served."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.simulation.result import SimulationResult
from trimtab_pipelines.request_outcome import LATE, OK

BIN_SECONDS = 2.0
QUANTILES = np.linspace(0.0, 1.0, 21)


@dataclass(frozen=True, slots=True)
class Cell:
    """What is offered to whom."""

    workload: str
    method: str
    factor: float = 1.0
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a cell.

    Attributes:
        cell: which.
        queries: how many came.
        utility: of what was right and in time: expected where it is simulated, by labels where it is served.
        types: the paper's four, shares of all queries: right in time, wrong in time, late, evicted.
        shares: of the queries answered, by point.
        over_time: the same in stretches of `BIN_SECONDS`, and the load in it.
        accuracies: quantiles of the expected accuracy of answers in time; empty without any.
    """

    cell: Cell
    queries: int
    utility: float
    types: tuple[float, float, float, float]
    shares: Mapping[str, float]
    over_time: Sequence[tuple[float, Mapping[str, float]]]
    accuracies: Sequence[float]


def of_simulated(cell: Cell, found: SimulationResult, utilities: NDArray[np.float64], stage: str) -> Measured:
    """Sum up a simulation of one stage; `utilities` are of its queries, [N]."""
    right = np.where(found.outcomes == OK, found.accuracy, 0.0)
    in_time, late = float((found.outcomes == OK).mean()), float((found.outcomes == LATE).mean())
    points = [given.get(stage, "") for given in found.points]
    return Measured(
        cell=cell,
        queries=found.outcomes.size,
        utility=float((utilities * right).sum()),
        types=(float(right.mean()), in_time - float(right.mean()), late, 1.0 - in_time - late),
        shares=shares_of(points),
        over_time=over_time(found.arrivals_seconds, points),
        accuracies=quantiles(found.accuracy[found.outcomes == OK]),
    )


def shares_of(points: Sequence[str]) -> dict[str, float]:
    """Which share of the answers each point gave; who has no answer has no point."""
    answered = [point for point in points if point]
    names, counts = np.unique(np.array(answered, dtype=str), return_counts=True)
    return {str(name): count / len(answered) for name, count in zip(names, counts, strict=True)}


def over_time(arrivals_seconds: NDArray[np.float64], points: Sequence[str]) -> list[tuple[float, Mapping[str, float]]]:
    """Queries a second, and shares by point, of those that came in each stretch."""
    bins = (arrivals_seconds // BIN_SECONDS).astype(int)
    by_bin: list[list[str]] = [[] for _ in range(int(bins.max(initial=-1)) + 1)]
    for place, point in zip(bins.tolist(), points, strict=True):
        by_bin[place].append(point)
    return [(len(each) / BIN_SECONDS, shares_of(each)) for each in by_bin]


def quantiles(values: NDArray[np.float64]) -> list[float]:
    """From the least to the most, evenly; empty without any."""
    return [float(q) for q in np.quantile(values, QUANTILES)] if values.size else []
