"""The evaluation as a table and as one HTML page that needs nothing else."""

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from benchmarks.ipa import plots, verdict
from benchmarks.ipa.cells import METHODS, OURS, RANKS, Measured
from benchmarks.ipa.data import Recorded
from benchmarks.ipa.evaluation import PAPER_NAMES, Evaluation
from benchmarks.ipa.verdict import Interval, Place, interval
from trimtab.report import html_page
from trimtab.report.html_page import Charts
from trimtab.report.summary import SummaryItem

HEADS = (
    "pipeline",
    "workload",
    "method",
    "PAS",
    "served PAS",
    "cores",
    "late",
    "dropped",
    "objective",
    "p99",
    "standing",
    "paper: PAS",
    "paper: cores",
)
FRONT_NOTE = (
    "Mean cores against mean PAS, over all seeds; crosses are the paper's recorded runs, on its own machines and with "
    "its batch sizes. A request late or dropped counts 0 in the served PAS shown here."
)
TIMELINE_NOTE = "Cores reserved and PAS planned, first seed."
ABLATION_NOTE = "Requests late or dropped, and cores: ours with each predictor, mean over seeds with its 95 % interval."
SWEEP_NOTE = "Ours, bursty, α from a quarter to 32 times the manifest's; crosses: the paper's sweep."
SOLVER_NOTE = "Exact solver, 7 batch sizes, median; crosses: Gurobi in the public code's notebook, on its own machine."
TABLE_NOTE = (
    "± is the half width of the 95 % interval over seeds. Served PAS: a request late or dropped counts 0. "
    "Standing: ours against the front of the baselines, by served PAS and cores."
)


def result_rows(evaluation: Evaluation) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    """Heads and rows of the table: one row a pipeline, workload and method."""
    rows = []
    for pipeline, workload in evaluation.pairs:
        places = {m: verdict.place(evaluation.results, pipeline, workload, m) for m in (OURS, RANKS)}
        for method in METHODS:
            cells = evaluation.results.get((pipeline, workload, method))
            if cells:
                paper = evaluation.recorded.get((pipeline, workload, PAPER_NAMES.get(method, "")))
                rows.append(_row(pipeline, workload, method, cells, paper, places.get(method)))
    return HEADS, rows


def _row(
    pipeline: str, workload: str, method: str, cells: Sequence[Measured], paper: Recorded | None, place: Place | None
) -> tuple[str, ...]:
    standing = ""
    if place is not None:
        standing = place.standing + (f" {place.beaten_by}" if place.beaten_by else "")
    return (
        pipeline,
        workload.replace("_", " "),
        method,
        _shown(interval(100 * c.accuracy for c in cells), 1),
        _shown(interval(100 * c.served_accuracy for c in cells), 1),
        _shown(interval(c.cores for c in cells), 1),
        _shown(interval(100 * c.late for c in cells), 2, " %"),
        _shown(interval(100 * c.dropped for c in cells), 2, " %"),
        _shown(interval(c.objective for c in cells), 2),
        f"{np.mean([c.p99_seconds for c in cells]):.2f} s",
        standing,
        f"{100 * paper.accuracy:.1f}" if paper else "",
        f"{paper.cores:.1f}" if paper else "",
    )


def _shown(value: Interval, digits: int, unit: str = "") -> str:
    if math.isnan(value.mean):
        return "–"
    half = "" if math.isnan(value.half) else f" ±{value.half:.{digits}f}"
    return f"{value.mean:.{digits}f}{half}{unit}"


def render(evaluation: Evaluation) -> str:
    """The page."""
    drawn: Charts = {}
    heads, rows = result_rows(evaluation)
    lead = f"{len(evaluation.measured)} simulations, {evaluation.seeds} seeds each · excerpts: {evaluation.excerpts}"
    body = [
        f"<h1>IPA's evaluation, simulated</h1><p class='lead'>{escape(lead)}</p>",
        html_page.summary_grid(_cards(evaluation)),
    ]
    for name in evaluation.pipelines:
        chart = plots.front(evaluation, name)
        body.append(html_page.section(f"{name}: accuracy against cores", FRONT_NOTE, chart, drawn))
    for name in evaluation.pipelines:
        chart = plots.timeline(evaluation, name)
        body.append(html_page.section(f"{name} over time, bursty", TIMELINE_NOTE, chart, drawn))
    body += [
        html_page.section("Predictors", ABLATION_NOTE, plots.ablation(evaluation), drawn),
        html_page.section("The weight of accuracy", SWEEP_NOTE, plots.sweep(evaluation), drawn),
        html_page.section("Solver time", SOLVER_NOTE, plots.solver(evaluation), drawn),
        f"<section><h2>All figures</h2><p class='note'>{escape(TABLE_NOTE)}</p>",
        html_page.table(heads, rows, numbers=range(3, 10)) + "</section>",
    ]
    return html_page.page("IPA's evaluation · Trimtab", "\n".join(body), drawn)


def _cards(evaluation: Evaluation) -> list[SummaryItem]:
    places = [verdict.place(evaluation.results, *pair) for pair in evaluation.pairs]
    counts = {name: sum(place.standing == name for place in places) for name in ("above", "on", "below")}
    worst = max(interval(c.violations for c in evaluation.results[(*pair, OURS)]).mean for pair in evaluation.pairs)
    detail = f"{counts['above']} above, {counts['on']} on, {counts['below']} below"
    good = f"{counts['above'] + counts['on']} of {len(places)}"
    requests = sum(one.requests for one in evaluation.measured)
    return [
        SummaryItem("on or above the baselines' front", good, detail, not counts["below"]),
        SummaryItem("worst violations, LSTM", f"{100 * worst:.2f} %", "late or dropped, mean over seeds"),
        SummaryItem("simulations", f"{len(evaluation.measured):,}", f"{requests:,} requests"),
    ]
