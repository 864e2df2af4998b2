"""Queries of OTAS's evaluation, simulated or served: what becomes of them, by load and method, and charts of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from benchmarks.harness import charts
from benchmarks.harness.charts import SLANTED_NAMES_PIXELS, bars, line
from benchmarks.harness.grid import Cell, Evaluation
from trimtab_adapter.simulation.result import SimulationResult
from trimtab_pipelines.request_outcome import LATE, OK

SYNTHETIC, BURSTY = "synthetic", "bursty"
WORKLOADS = (SYNTHETIC, BURSTY)
PAPER_LOAD = 1.0
OURS, OTAS, PETS = "TokenAdaptive", "OTAS", "PetS-like"
BIN_SECONDS = 2.0
QUANTILES = np.linspace(0.0, 1.0, 21)
TYPES = ("right in time", "wrong in time", "late", "evicted")
"""The paper's four types of queries."""
TYPE_COLOURS = ("#3f9a5f", "#e0b43e", "#e08a2e", "#cf4b4b")
METHOD_COLOURS = ("#3f7fd9", "#9b7fd9", "#868d98", "#5f6670", "#b0691c", "#e08a2e", "#5a9a6a")
POINT_COLOURS = ("#8c2d2d", "#cf4b4b", "#e08a2e", "#e0b43e", "#868d98", "#7fb0f0", "#3f7fd9", "#1f4f99")


@dataclass(frozen=True, slots=True)
class QueryRow:
    """What became of a cell's queries.

    Attributes:
        utility: of what was right and in time: expected if simulated, by labels if served.
        types: shares of all queries, as TYPES.
        over_time: queries a second and answers by point, in stretches of `BIN_SECONDS`.
        points: of the answered queries, the share of each point.
        accuracies: quantiles of the expected accuracy of answers in time; empty without any.
    """

    cell: Cell
    queries: int
    utility: float
    types: tuple[float, float, float, float]
    points: Mapping[str, float]
    over_time: Sequence[tuple[float, Mapping[str, float]]]
    accuracies: Sequence[float]


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
        over_time=shares_over_time(result.arrivals_seconds, points),
        accuracies=accuracy_quantiles(result.accuracy[result.outcomes == OK]),
    )


def point_shares(points: Sequence[str]) -> dict[str, float]:
    """Return the share of the answers that each point gave; queries without an answer have no point."""
    answered = [point for point in points if point]
    names, counts = np.unique(np.array(answered, dtype=str), return_counts=True)
    return {str(name): count / len(answered) for name, count in zip(names, counts, strict=True)}


def shares_over_time(
    arrivals_seconds: NDArray[np.float64], points: Sequence[str]
) -> list[tuple[float, Mapping[str, float]]]:
    """Return queries a second and shares by point of the queries that arrive in each stretch."""
    bins = (arrivals_seconds // BIN_SECONDS).astype(int)
    by_bin: list[list[str]] = [[] for _ in range(int(bins.max(initial=-1)) + 1)]
    for index, point in zip(bins.tolist(), points, strict=True):
        by_bin[index].append(point)
    return [(len(points_of_bin) / BIN_SECONDS, point_shares(points_of_bin)) for points_of_bin in by_bin]


def accuracy_quantiles(accuracies: NDArray[np.float64]) -> list[float]:
    """Return even quantiles, ascending; empty without values."""
    return [float(quantile) for quantile in np.quantile(accuracies, QUANTILES)] if accuracies.size else []


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

    def first_seed(self, workload: str, method: str) -> QueryRow:
        return self.rows((workload,), method, PAPER_LOAD)[0]


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
    columns = [
        (
            workload,
            [
                line(
                    method,
                    factors,
                    [100 * (1 + evaluation.gain(workload, OTAS, factor, ours=method)) for factor in factors],
                    colour,
                    bold=method == OURS,
                )
                for factors in [evaluation.factors((workload,))]
                for method, colour in zip(methods, METHOD_COLOURS, strict=False)
            ],
        )
        for workload in evaluation.workloads
    ]
    return charts.panels(columns, x="load", y="utility, % of OTAS")


def chart_over_time(evaluation: QueryEvaluation, workload: str, points: Sequence[str]) -> go.Figure:
    """Return areas of the answers by point over time, and the load as a line, for ours and OTAS as printed."""
    columns = []
    for method in (OURS, OTAS):
        series = evaluation.first_seed(workload, method).over_time
        seconds = [BIN_SECONDS * index for index in range(len(series))]
        areas = [
            go.Scatter(
                x=seconds,
                y=[100 * shares.get(point, 0.0) for _, shares in series],
                name=point.removeprefix("g"),
                stackgroup="points",
                line={"width": 0},
                fillcolor=colour,
            )
            for point, colour in zip(points, POINT_COLOURS, strict=False)
        ]
        columns.append((method, [*areas, line("queries/s", seconds, [rps for rps, _ in series], "#222")]))
    return charts.panels(columns, x="seconds", y="answers, %", second_axis="queries/s")


def chart_accuracies(evaluation: QueryEvaluation, methods: Sequence[str]) -> go.Figure:
    """Return the share of answers in time that are expected to be no more accurate, by accuracy."""
    columns = [
        (
            workload,
            [
                line(method, quantiles, [100 * i / (len(quantiles) - 1) for i in range(len(quantiles))], colour)
                for method, colour in zip(methods, METHOD_COLOURS, strict=False)
                for quantiles in [evaluation.first_seed(workload, method).accuracies]
            ],
        )
        for workload in evaluation.workloads
    ]
    return charts.panels(columns, x="expected accuracy", y="answers, %")
