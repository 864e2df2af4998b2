"""Jobs of MOSEL's evaluation, simulated or served: the paper's load, what becomes of its jobs, and charts of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from benchmarks.harness import charts
from benchmarks.harness.grid import Cell, Evaluation
from trimtab_adapter.simulation.result import SimulationResult
from trimtab_pipelines.request_outcome import LATE, OK
from trimtab_predictor.trace import read_trace

TRACE = "twitter_rps_train.csv.gz"
START_SECONDS = 869_160
"""Second of the trace at which a bursty stretch begins."""
SLO_SECONDS = 1.0
"""The paper does not print its latency SLOs; its models are loaded by what they do within one second."""
MAX_QUEUED_ROWS = 100_000
"""Admission rejects nothing: what is too much is the policy's to drop."""
MIN_RPS = 5.0
SIZE_MEAN, SIZE_DEVIATION = 1.0, 6.0
MAX_VIOLATIONS = 0.01
ROUNDING = 1e-9
OURS, MOSEL, PLAIN = "ModalityMix", "Mosel", "AllModalities"
NO_ESCALATION = "ours, no escalation"
METHODS = (OURS, NO_ESCALATION, MOSEL, PLAIN, "Aggressive", "Random")
COLOURS = dict(
    zip(
        METHODS,
        ("#3f7fd9", "#7fb0f0", "#cf4b4b", "#868d98", "#e08a2e", "#b0691c"),
        strict=True,
    )
)


@dataclass(frozen=True, slots=True, eq=False)
class Jobs:
    """Jobs of one run: when each arrives, its rows, and its floor as a share of the model's range of accuracies."""

    at_seconds: NDArray[np.float64]
    rows: NDArray[np.int64]
    floor_share: NDArray[np.float64]

    def floors(self, accuracies: Sequence[float]) -> NDArray[np.float64]:
        """Return the accuracy floors for a model whose subsets have these accuracies, [N]."""
        low, high = min(accuracies), max(accuracies)
        return low + self.floor_share * (high - low)


def load_shape(trace: Path | None, start_seconds: int, seconds: int) -> NDArray[np.float64]:
    """Return the load of each second, 0 … 1; without a trace plateaus with steps and bursts, as Twitter has them."""
    if trace is None:
        rng = np.random.default_rng(0)
        plateaus = np.repeat(rng.uniform(0.1, 1.0, seconds // 20 + 1), 20)[:seconds]
        counts = rng.poisson(60 * plateaus).astype(np.float64)
    else:
        counts = np.nan_to_num(read_trace(trace).excerpt(start_seconds, start_seconds + seconds).rps)
    low, high = counts.min(), counts.max()
    shares: NDArray[np.float64] = (counts - low) / max(high - low, 1.0)
    return shares


def draw_jobs(shape: NDArray[np.float64], max_rps: float, seed: int) -> Jobs:
    """Draw jobs that make up the queries of each second, between the minimum load and `max_rps` (section 7.1)."""
    rng = np.random.default_rng(seed)
    at: list[float] = []
    rows: list[int] = []
    for second, share in enumerate(shape):
        left = round(MIN_RPS + share * max(max_rps - MIN_RPS, 0.0))
        while left > 0:
            size = min(max(round(abs(rng.normal(SIZE_MEAN, SIZE_DEVIATION))), 1), left)
            at.append(second + rng.random())
            rows.append(size)
            left -= size
    order = np.argsort(at)
    return Jobs(np.array(at)[order], np.array(rows)[order], rng.random(len(at)))


@dataclass(frozen=True, slots=True)
class JobRow:
    """What became of a cell's jobs; seconds, and shares of all jobs.

    Attributes:
        violations: not answered in time.
        met: answered in time and, by expectation, as accurate as the job asked.
        answered_rps: queries (rows) a second that were answered in time.
        mean_seconds: of the answered jobs.
        pending: answered before an escalation of some rows.
        escalated: share of the rows.
    """

    cell: Cell
    jobs: int
    violations: float
    met: float
    accuracy: float
    answered_rps: float
    mean_seconds: float
    pending: float
    escalated: float


def simulated_row(
    cell: Cell, result: SimulationResult, rows: NDArray[np.int64], floors: NDArray[np.float64], stage: str
) -> JobRow:
    """Sum up a simulation of jobs with these rows and floors, [N]."""
    in_time, answered = result.outcomes == OK, result.outcomes <= LATE
    escalated = result.escalated_rows[stage]
    return JobRow(
        cell=cell,
        jobs=result.outcomes.size,
        violations=result.violations,
        met=float((in_time & (result.accuracy >= floors - 1e-3)).mean()),
        accuracy=result.mean_accuracy,
        answered_rps=float(rows[in_time].sum() / result.duration_seconds),
        mean_seconds=float(result.latency_seconds[answered].mean()) if answered.any() else float("nan"),
        pending=float(result.unescalated.mean()),
        escalated=escalated / max(sum(result.rows_by_point[stage].values()) - escalated, 1),
    )


def violations(row: JobRow) -> float:
    return row.violations


def met(row: JobRow) -> float:
    return row.met


def completion_seconds(row: JobRow) -> float:
    return row.mean_seconds


def carried_rps(evaluation: Evaluation[JobRow], model: str, method: str) -> float:
    """Queries a second answered in time at the highest load up to which at most 1 % of the jobs are violated.

    Between two loads of the grid the figures are interpolated.
    """
    carried, before = 0.0, 0.0
    for factor in evaluation.factors((model,)):
        now = evaluation.mean((model,), method, violations, factor)
        answered = evaluation.mean((model,), method, lambda row: row.answered_rps, factor)
        if now > MAX_VIOLATIONS:
            share = (MAX_VIOLATIONS - before) / max(now - before, ROUNDING)
            return carried + max(share, 0.0) * max(answered - carried, 0.0)
        carried, before = answered, now
    return carried


BY_LOAD: Sequence[tuple[str, str, Callable[[JobRow], float], str]] = (
    (
        "Violations by load",
        "Jobs without an answer in time, in %; at 1 the peak is twice what all modalities carry.",
        lambda row: 100 * row.violations,
        "violations, %",
    ),
    (
        "Jobs that met both SLOs, by load",
        "In time, and expected to be as accurate as asked, in %.",
        lambda row: 100 * row.met,
        "both met, %",
    ),
    ("Completion time by load", "Mean seconds of the answered jobs.", completion_seconds, "seconds"),
)
"""Title, note, figure and y axis of each chart of figures by load."""
Panel = tuple[str, Evaluation[JobRow], str]
"""A title, and the evaluation and model below it."""


def chart_by_load(
    titled: Sequence[Panel],
    methods: Sequence[str],
    figure: Callable[[JobRow], float],
    y: str,
) -> go.Figure:
    """Return lines over the loads, one a method, in a panel for each model."""
    columns = [
        (
            title,
            [
                charts.line(
                    method,
                    factors,
                    [evaluation.mean((model,), method, figure, factor) for factor in factors],
                    COLOURS[method],
                    bold=method == OURS,
                    mode="lines+markers",
                )
                for factors in [evaluation.factors((model,))]
                for method in methods
            ],
        )
        for title, evaluation, model in titled
    ]
    return charts.panels(columns, x="load", y=y)
