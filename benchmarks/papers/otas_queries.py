"""Queries of OTAS's evaluation, simulated or served: their arrivals, what answers them, and what becomes of them.

OTAS prints few of its figures (its figure 4 is a plot). Printed and used as they are: the throughput at 0 and −15, both
tables, the drop below −15, the load. The throughputs between follow from table I, whose thresholds fall as they do.
Accuracies are not printed, but for the drop: these have the order and the shape that the paper's text and the published
results of prompts and merging give. `ASSUMED` lists all of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from benchmarks.harness import charts
from benchmarks.harness.charts import SLANTED_NAMES_PIXELS, bars
from benchmarks.harness.grid import Cell, Evaluation
from benchmarks.papers.one_stage import FULL_BATCH, SimulatedPoint
from trimtab_adapter.simulation.result import SimulationResult
from trimtab_pipelines.request_outcome import LATE, OK
from trimtab_predictor.trace import TraceError, read_trace

FIXED_ROWS = 2.5
"""What a batch takes however small, in rows of a full one: small batches are inefficient on a GPU (figure 7)."""


@dataclass(frozen=True, slots=True)
class Option:
    """A number of tokens, or a model: rows a second in full batches, accuracy by task."""

    name: str
    rps: float
    accuracy: Mapping[str, float]

    @property
    def mean_accuracy(self) -> float:
        """Accuracy over the paper's queries, which ask for its three tasks equally often."""
        return sum(self.accuracy.values()) / len(self.accuracy)

    def seconds(self, rows: float) -> float:
        """Return the seconds of a batch."""
        row = FULL_BATCH / self.rps / (FULL_BATCH + FIXED_ROWS)
        return row * (FIXED_ROWS + rows)

    @property
    def point(self) -> SimulatedPoint:
        return SimulatedPoint(point_name(self.name), self.mean_accuracy, self.seconds, accuracy_by_task=self.accuracy)


def point_name(name: str) -> str:
    """Return an option's name as a point's, which begins with a letter."""
    return f"g{name}" if name[-1].isdigit() else name


@dataclass(frozen=True, slots=True)
class Query:
    """A type of query (table II); `seconds` is its deadline."""

    task: str
    seconds: float
    utility: float


def _option(name: str, rps: float, *accuracy: float) -> Option:
    return Option(name, rps, dict(zip(("cifar10", "cifar100", "eurosat"), accuracy, strict=True)))


GAMMAS = (
    _option("-20", 1250.0, 0.80, 0.55, 0.82),
    _option("-15", 1000.0, 0.925, 0.745, 0.925),
    _option("-10", 580.0 * 519 / 379, 0.94, 0.775, 0.935),
    _option("-5", 580.0 * 449 / 379, 0.947, 0.79, 0.94),
    _option("0", 580.0, 0.95, 0.80, 0.945),
    _option("2", 580.0 / 1.09, 0.965, 0.85, 0.96),
    _option("4", 580.0 / 1.19, 0.968, 0.86, 0.962),
    _option("8", 580.0 / 1.36, 0.97, 0.87, 0.965),
)
"""The paper's list."""
MERGED, PROMPTED, PLAIN = "-15", "2", "0"
"""The fixed numbers of ToMe (the strongest before the drop) and VPT (two prompts, section V), and PetS's."""

MODELS = (
    _option("small", 580.0 * 953 / 309, 0.93, 0.75, 0.935),
    _option("base", 580.0, 0.95, 0.80, 0.945),
    _option("large", 580.0 * 95 / 309, 0.96, 0.83, 0.95),
)
"""ViT-S, -B and -L with the relative throughputs of ToMe's README."""
LOAD_SECONDS = {"small": 0.23, "base": 0.77, "large": 6.2}
"""To make a model and read its weights from memory: timm on one core, the better of two tries. The paper does not print
its own; one model is loaded at a time, as in the paper."""
QUERIES = (
    Query("cifar10", 0.6, 0.3),
    Query("cifar10", 1.0, 0.01),
    Query("cifar100", 0.6, 1.0),
    Query("cifar100", 1.0, 0.2),
    Query("eurosat", 0.6, 0.3),
    Query("eurosat", 1.0, 0.01),
)
"""Table II."""
TABLE_RPS = ((279.0, "8"), (319.0, "4"), (349.0, "2"), (379.0, "0"), (449.0, "-5"), (519.0, "-10"), (1000.0, "-15"))
"""Table I: up to which rate each is used, −20 above all; 349 and 1000, which it omits, go to the one before."""
ASSUMED = (
    "all accuracies but that they fall off below −15; throughputs at −20, −10, −5, 2, 4, 8 (by table I); what a small "
    "batch costs; how long the rate of the synthetic load stays as it is (2 to 20 s); accuracies of ViT-S and -L; "
    "seconds to load a model (measured with timm on a core)"
)

TRACE = "twitter_rps_train.csv.gz"
START_SECONDS = 869_160
"""Second of the trace at which a bursty stretch begins."""
MIN_RPS, MAX_RPS = 200.0, 700.0
HOLD_SECONDS = (2, 20)
DENSER = 20
"""Seconds of the trace that make one of the load; the paper makes one of two minutes."""
CALM_RPS, CALM_SHARE = 300.0, 0.6
"""In more than 60 % of the seconds of the paper's trace there are fewer than 300 queries; in some above 600."""


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """When each query arrives, and its type as an index of QUERIES."""

    at_seconds: NDArray[np.float64]
    types: NDArray[np.int64]


def synthetic_rps(seconds: int, seed: int) -> NDArray[np.float64]:
    """Return the rate in each second: plateaus of some seconds at 200 to 700 a second."""
    rng = np.random.default_rng(seed)
    rates: list[float] = []
    while len(rates) < seconds:
        rates += [float(rng.uniform(MIN_RPS, MAX_RPS))] * int(rng.integers(*HOLD_SECONDS, endpoint=True))
    return np.array(rates[:seconds])


def bursty_rps(trace: Path | None, start_seconds: int, seconds: int) -> NDArray[np.float64]:
    """Return the rate in each second of a trace, made denser and scaled as the paper's; without one synthetic bursts.

    Raises TraceError if the seconds are not within the trace, or most are empty: no factor makes them the paper's.
    """
    if trace is None:
        rng = np.random.default_rng(0)
        rates = np.repeat(150.0 * rng.lognormal(0.0, 0.8, seconds // 8 + 1), 8)[:seconds]
    else:
        excerpt = read_trace(trace).excerpt(start_seconds, start_seconds + seconds * DENSER)
        rates = np.nan_to_num(excerpt.rps).reshape(seconds, DENSER).mean(axis=1)
    calm = float(np.quantile(rates, CALM_SHARE))
    if not calm > 0:
        raise TraceError(
            f"{trace}: {CALM_SHARE:.0%} of the {seconds} x {DENSER} s from second {start_seconds} have no requests; "
            f"choose other seconds (--trace-start) whose rate can be scaled to {CALM_RPS:g} a second"
        )
    scaled: NDArray[np.float64] = rates * CALM_RPS / calm
    return scaled


def draw_requests(rates: NDArray[np.float64], factor: float, seed: int) -> Requests:
    """Draw Poisson arrivals at these rates times a factor, with types of equal probability."""
    rng = np.random.default_rng(seed)
    counts = rng.poisson(rates * factor)
    at = np.sort(np.repeat(np.arange(rates.size), counts) + rng.random(int(counts.sum())))
    return Requests(at, rng.integers(0, len(QUERIES), at.size))


SYNTHETIC, BURSTY = "synthetic", "bursty"
WORKLOADS = (SYNTHETIC, BURSTY)
PAPER_LOAD = 1.0
OURS, OTAS, PETS = "TokenAdaptive", "OTAS", "PetS-like"
TYPES = ("right in time", "wrong in time", "late", "evicted")
"""The paper's four types of queries."""
TYPE_COLOURS = ("#3f9a5f", "#e0b43e", "#e08a2e", "#cf4b4b")
METHOD_COLOURS = ("#3f7fd9", "#9b7fd9", "#868d98", "#5f6670", "#b0691c", "#e08a2e", "#5a9a6a")


@dataclass(frozen=True, slots=True)
class QueryRow:
    """What became of a cell's queries."""

    cell: Cell
    queries: int
    utility: float
    """Of what was right and in time: expected if simulated, by labels if served."""
    types: tuple[float, float, float, float]
    """Shares of all queries, as TYPES."""
    points: Mapping[str, float]
    """Of the answered queries, the share of each point."""


def simulated_row(cell: Cell, result: SimulationResult, utilities: NDArray[np.float64], stage: str) -> QueryRow:
    """Sum up a simulation of one stage; `utilities` are of its queries, [N]."""
    right = np.where(result.outcomes == OK, result.accuracy, 0.0)
    in_time, late = float((result.outcomes == OK).mean()), float((result.outcomes == LATE).mean())
    points = [by_stage.get(stage, "") for by_stage in result.points]
    return QueryRow(
        cell=cell,
        queries=result.outcomes.size,
        utility=float((utilities * right).sum()),
        types=(float(right.mean()), in_time - float(right.mean()), late, 1.0 - in_time - late),
        points=point_shares(points),
    )


def point_shares(points: Sequence[str]) -> dict[str, float]:
    """Return the share of the answers that each point gave; queries without an answer have no point."""
    answered = [point for point in points if point]
    names, counts = np.unique(np.array(answered, dtype=str), return_counts=True)
    return {str(name): count / len(answered) for name, count in zip(names, counts, strict=True)}


class QueryEvaluation(Evaluation[QueryRow]):
    """Rows of the grid, and comparisons of their utilities; at the paper's load unless a factor is given."""

    def __init__(self, rows: Iterable[QueryRow]) -> None:
        super().__init__(rows)
        self.workloads = [workload for workload in WORKLOADS if (workload,) in self.cases]

    def utility(self, workload: str, method: str, factor: float = PAPER_LOAD) -> float:
        return self.mean((workload,), method, lambda row: row.utility, factor)

    def type_share(self, workload: str, method: str, index: int) -> float:
        """Return the mean share of the type TYPES[index]."""
        return self.mean((workload,), method, lambda row: row.types[index], PAPER_LOAD)

    def gain(self, workload: str, rival: str, factor: float = PAPER_LOAD, ours: str = OURS) -> float:
        """Return by which share of a rival's utility ours is more."""
        return self.utility(workload, ours, factor) / self.utility(workload, rival, factor) - 1.0


def method_key(method: str) -> str:
    """Return a method's name as figures spell it."""
    words = "".join(letter if letter.isalnum() else " " for letter in method.lower().replace("λ", "price"))
    return "_".join(words.split())


def chart_types(evaluation: QueryEvaluation, methods: Sequence[str]) -> go.Figure:
    """Return stacked bars of the four types, by load and method."""
    columns = [
        (
            workload,
            [
                bars(
                    name, methods, [100 * evaluation.type_share(workload, method, index) for method in methods], colour
                )
                for index, (name, colour) in enumerate(zip(TYPES, TYPE_COLOURS, strict=True))
            ],
        )
        for workload in evaluation.workloads
    ]
    return charts.panels(columns, y="queries, %", below=SLANTED_NAMES_PIXELS).update_layout(barmode="stack")


def chart_by_load(evaluation: QueryEvaluation, methods: Sequence[str]) -> go.Figure:
    """Return lines of utility in % of OTAS as printed, by factor of the load."""

    def figure(case: tuple[str, ...], method: str, factor: float) -> float:
        return 100 * (1 + evaluation.gain(case[0], OTAS, factor, ours=method))

    cases = {workload: (workload,) for workload in evaluation.workloads}
    colours = dict(zip(methods, METHOD_COLOURS, strict=False))
    return charts.lines_by_load(evaluation, cases, colours, figure, y="utility, % of OTAS")
