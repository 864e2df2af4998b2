"""Grid of cells: every case by every method, load and seed; cells run in processes, and their rows are averaged."""

import itertools
import math
import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trimtab.options import console

_STUDENT_97_5 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the grid."""

    case: tuple[str, ...]
    """Names of what is run: a pipeline or model, a workload, or both."""
    method: str
    """What decides."""
    factor: float = 1.0
    """Multiplies the load."""
    seed: int = 1
    """Of everything that is drawn."""


def grid(
    cases: Iterable[tuple[str, ...]], methods: Iterable[str], *, factors: Iterable[float] = (1.0,), seeds: int = 1
) -> list[Cell]:
    """Return the cells of all combinations; seeds count from 1."""
    sides = (cases, methods, factors, range(1, seeds + 1))
    return [Cell(*sides) for sides in itertools.product(*sides)]


class Row(Protocol):
    """Result of a cell."""

    @property
    def cell(self) -> Cell: ...


AnyRow = TypeVar("AnyRow", bound=Row)


def run_cells(measure: Callable[[Cell], AnyRow], cells: Sequence[Cell], processes: int) -> list[AnyRow]:
    """Measure all cells in processes of their own and show the progress; rows are in the order of their ends."""
    rows: list[AnyRow] = []
    pool = multiprocessing.get_context("spawn").Pool(processes)
    with progress_bar() as bar, pool:
        task = bar.add_task("simulating", total=len(cells))
        for row in pool.imap_unordered(measure, cells):
            rows.append(row)
            bar.update(task, advance=1, description=" ".join((*row.cell.case, row.cell.method)))
    return rows


def progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


class Evaluation(Generic[AnyRow]):
    """Rows of a grid by case, method and factor; those of several seeds are in the order of the seeds."""

    def __init__(self, rows: Iterable[AnyRow]) -> None:
        self.all_rows = sorted(rows, key=lambda row: row.cell.seed)
        self._rows: dict[Cell, list[AnyRow]] = defaultdict(list)
        for row in self.all_rows:
            self._rows[replace(row.cell, seed=0)].append(row)

    @property
    def cases(self) -> list[tuple[str, ...]]:
        return sorted({cell.case for cell in self._rows})

    def factors(self, case: tuple[str, ...]) -> list[float]:
        """Return the loads of a case, ascending."""
        return sorted({cell.factor for cell in self._rows if cell.case == case})

    def rows(self, case: tuple[str, ...], method: str, factor: float = 1.0) -> list[AnyRow]:
        """Return the rows of all seeds; empty if the cell was not run."""
        return self._rows.get(Cell(case, method, factor, 0), [])

    def mean(
        self, case: tuple[str, ...], method: str, figure: Callable[[AnyRow], float], factor: float | None = None
    ) -> float:
        """Return the mean of a figure over the seeds, and over all loads if `factor` is None."""
        factors = self.factors(case) if factor is None else [factor]
        rows = [row for load in factors for row in self.rows(case, method, load)]
        return float(np.mean([figure(row) for row in rows]))


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and the half width of its 95 % interval (Student's t); NaN with one seed."""

    mean: float
    half: float

    def format(self, digits: int, unit: str = "") -> str:
        if math.isnan(self.mean):
            return "–"
        half = "" if math.isnan(self.half) else f" ±{self.half:.{digits}f}"
        return f"{self.mean:.{digits}f}{half}{unit}"


def interval(values: Iterable[float]) -> Interval:
    """Return the mean of values, one of each seed, and its 95 % interval."""
    sample = np.array(list(values), dtype=np.float64)
    if sample.size < 2:
        return Interval(float(sample.mean()) if sample.size else math.nan, math.nan)
    student = _STUDENT_97_5.get(sample.size, 1.96)
    return Interval(float(sample.mean()), student * float(sample.std(ddof=1)) / math.sqrt(sample.size))


RESAMPLES = 2_000
Rounds = Sequence[NDArray[np.float64]]
"""The measurements of each round."""
Sample = NDArray[np.int64]
"""Indexes of resampled rounds."""


def p99(rounds: Rounds, sample: Sample) -> float:
    """Return the 99th percentile of the pooled rounds, or infinity if they are empty."""
    pooled = np.concatenate([rounds[number] for number in sample])
    return float(np.quantile(pooled, 0.99)) if len(pooled) else float("inf")


def confidence_interval(statistic: Callable[[Sample], float], rounds: int) -> tuple[float, float]:
    """Return the 90 % bootstrap interval of a statistic of rounds.

    Measurements of one round share the state of the machine, so rounds are resampled, not measurements.
    """
    random = np.random.default_rng(0)
    low, high = np.quantile([statistic(random.integers(rounds, size=rounds)) for _ in range(RESAMPLES)], (0.05, 0.95))
    return float(low), float(high)
