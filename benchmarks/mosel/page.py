"""The evaluation as a table and as one HTML page that needs nothing else."""

from collections.abc import Callable
from html import escape

import plotly.graph_objects as go

from benchmarks.mosel import served_page
from benchmarks.mosel.beside import Beside
from benchmarks.mosel.cells import METHODS, ONCE, OURS, Measured
from benchmarks.mosel.evaluation import Evaluation
from benchmarks.mosel.models import MODELS
from benchmarks.mosel.plots import Panel, by_load
from trimtab.report import html_page
from trimtab.report.html_page import Charts
from trimtab.report.summary import SummaryItem

HEADS = (
    "model",
    "policy",
    "violations",
    "both SLOs met",
    "accuracy",
    "provisional",
    "seen again",
    "completion",
    "queries/s at ≤ 1 %",
    "beside all senses",
    "paper's gain",
)
TABLE_NOTE = (
    "Means over all loads. Both SLOs met: answered in time and, by expectation, as accurate as the job asked. "
    "Seen again: rows that were looked at a second time, of all first looks. Completion: mean seconds of what was "
    "answered."
)
ASSUMED_NOTE = (
    "The paper prints few figures of its models. Printed and used as they are: TVLT's accuracies and the 11 times its "
    "audio is faster, the most queries offered to each model, the gains. Assumed: "
)
LOOK_NOTE = (
    "Second looks are not in the paper: ours with them assumes that the least certain share p of the rows holds "
    "1 − (1 − p)² of what a wider subset gains. Nothing of that is in what is judged against MOSEL."
)


def result_rows(evaluation: Evaluation) -> list[tuple[str, ...]]:
    """Rows of the table: one a model and policy."""
    rows: list[tuple[str, ...]] = []
    for model in MODELS:
        plain = evaluation.carried_rps(model.name, "AllModalities")
        for method in METHODS:

            def mean(of: Callable[[Measured], float], method: str = method, model: str = model.name) -> float:
                return evaluation.mean(model, method, of)

            carried = evaluation.carried_rps(model.name, method)
            rows.append(
                (
                    model.name,
                    method,
                    f"{100 * mean(lambda one: one.violations):.1f} %",
                    f"{100 * mean(lambda one: one.met):.1f} %",
                    f"{mean(lambda one: one.accuracy):.3f}",
                    f"{100 * mean(lambda one: one.provisional):.1f} %",
                    f"{100 * mean(lambda one: one.again):.1f} %",
                    f"{mean(lambda one: one.mean_seconds):.2f} s",
                    f"{carried:.1f}",
                    f"{carried / plain:.2f}" if plain > 0 else "–",
                    f"{model.gains[0]:g}" if method == "Mosel" else "",
                )
            )
    return rows


def render(evaluation: Evaluation, beside: Beside | None = None) -> str:
    """The page; with what was served, where it was."""
    drawn: Charts = {}
    lead = f"{len(evaluation.measured)} simulations · load: {evaluation.trace}"
    assumed = "; ".join(f"{model.name}: {model.assumed}" for model in MODELS)
    body = [
        f"<h1>MOSEL's evaluation, simulated{' and served' if beside else ''}</h1><p class='lead'>{escape(lead)}</p>",
        html_page.summary_grid(_cards(evaluation)),
        html_page.section(
            "Violations by load",
            "Jobs without an answer in time, in %; 1 is the paper's load, whose peak is twice what all senses carry.",
            _by_load(evaluation, lambda one: 100 * one.violations, "violations, %"),
            drawn,
        ),
        html_page.section(
            "Jobs that met both SLOs, by load",
            "In time, and expected to be as accurate as asked, in %.",
            _by_load(evaluation, lambda one: 100 * one.met, "both met, %"),
            drawn,
        ),
        html_page.section(
            "Completion time by load",
            "Mean seconds from arrival to answer; what was dropped has none.",
            _by_load(evaluation, lambda one: one.mean_seconds, "seconds"),
            drawn,
        ),
        f"<section><h2>All figures</h2><p class='note'>{escape(TABLE_NOTE)}</p>"
        + html_page.table(HEADS, result_rows(evaluation), numbers=range(2, 11))
        + "</section>",
        *(served_page.sections(beside, drawn) if beside else ()),
        _said(ASSUMED_NOTE + assumed + ".", LOOK_NOTE),
    ]
    return html_page.page("MOSEL's evaluation · Trimtab", body, drawn)


def _said(*notes: str) -> str:
    told = "".join(f"<p class='note'>{escape(note)}</p>" for note in notes)
    return f"<section><h2>What is the paper's, and what is assumed</h2>{told}</section>"


def _cards(evaluation: Evaluation) -> list[SummaryItem]:
    better = sum(
        evaluation.mean(model.name, ONCE, lambda one: one.met)
        > evaluation.mean(model.name, "Mosel", lambda one: one.met)
        for model in MODELS
    )
    names = (OURS, ONCE, "Mosel", "AllModalities")
    lost = {n: sum(evaluation.mean(m.name, n, lambda one: one.violations) for m in MODELS) / len(MODELS) for n in names}
    return [
        SummaryItem(
            "models with more jobs that met both SLOs", f"{better} of {len(MODELS)}", "than MOSEL's policy", better == 5
        ),
        *(
            SummaryItem(f"violations, {name}", f"{100 * value:.1f} %", "mean over models and loads")
            for name, value in lost.items()
        ),
    ]


def _by_load(evaluation: Evaluation, of: Callable[[Measured], float], title: str) -> go.Figure:
    return by_load([Panel(model.name, evaluation, model.name) for model in MODELS], METHODS, of, title)
