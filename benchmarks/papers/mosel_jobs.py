"""Jobs of MOSEL's evaluation, simulated or served: the paper's load, what becomes of its jobs, and charts of it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
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
COLOURS = dict(zip(METHODS, ("#3f7fd9", "#7fb0f0", "#cf4b4b", "#868d98", "#e08a2e", "#b0691c"), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Jobs:
    """Jobs of one run."""

    arrivals_seconds: NDArray[np.float64]
    """[N], ascending."""
    rows: NDArray[np.int64]
    """Of each job, [N]."""
    floors: NDArray[np.float64]
    """The accuracy that each asks for, [N]."""
    seconds: float
    """Length of the load."""
    seed: int
    """They were drawn with."""

    @property
    def jobs_rps(self) -> float:
        return self.rows.size / self.seconds


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


def draw_jobs(shape: NDArray[np.float64], max_rps: float, accuracies: Collection[float], seed: int = 1) -> Jobs:
    """Draw jobs that make up the queries of each second, between the minimum load and `max_rps` (section 7.1).

    Their floors lie between the accuracies of the model's worst and best subset.
    """
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
    floors = rng.uniform(min(accuracies), max(accuracies), len(at))
    return Jobs(np.array(at)[order], np.array(rows)[order], floors, float(shape.size), seed)


@dataclass(frozen=True, slots=True)
class JobRow:
    """What became of a cell's jobs; seconds, and shares of all jobs."""

    cell: Cell
    jobs: int
    violations: float
    """Not answered in time."""
    met: float
    """Answered in time and, by expectation, as accurate as the job asked."""
    accuracy: float
    answered_rps: float
    """Queries (rows) a second that were answered in time."""
    mean_seconds: float
    """Of the answered jobs."""
    pending: float
    """Answered before an escalation of some rows."""
    escalated: float
    """Share of the rows."""


def simulated_row(cell: Cell, result: SimulationResult, jobs: Jobs, stage: str) -> JobRow:
    """Sum up a simulation of jobs."""
    in_time, answered = result.outcomes == OK, result.outcomes <= LATE
    escalated = result.escalated_rows[stage]
    return JobRow(
        cell=cell,
        jobs=result.outcomes.size,
        violations=result.violations,
        met=float((in_time & (result.accuracy >= jobs.floors - 1e-3)).mean()),
        accuracy=result.mean_accuracy,
        answered_rps=float(jobs.rows[in_time].sum() / result.duration_seconds),
        mean_seconds=float(result.latency_seconds[answered].mean()) if answered.any() else float("nan"),
        pending=float(result.unescalated.mean()),
        escalated=escalated / max(sum(result.rows_by_point[stage].values()) - escalated, 1),
    )


Figure = Callable[[JobRow], float]
violations: Figure = attrgetter("violations")
met: Figure = attrgetter("met")
completion_seconds: Figure = attrgetter("mean_seconds")


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


BY_LOAD: Sequence[tuple[str, str, Figure, str]] = (
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


def chart_by_load(
    evaluation: Evaluation[JobRow], models: Mapping[str, str], methods: Sequence[str], figure: Figure, y: str
) -> go.Figure:
    """Return lines over the loads, one a method, in a panel for each model; `models` are by the panels' titles."""
    cases = {title: (model,) for title, model in models.items()}
    colours = {method: COLOURS[method] for method in methods}

    def mean(case: tuple[str, ...], method: str, factor: float) -> float:
        return evaluation.mean(case, method, figure, factor)

    return charts.lines_by_load(evaluation, cases, colours, mean, y=y)
