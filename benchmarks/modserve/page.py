"""The evaluation as a table and as one HTML page that needs nothing else."""

from collections.abc import Iterable
from html import escape
from typing import Final

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from benchmarks.evaluating import laid_out
from benchmarks.modserve.cells import FACTORS, IMAGE_COUNTS, LOADS, SYSTEMS, Evaluation
from benchmarks.modserve.cluster import DECOUPLED, MONOLITH, OURS, ROUTED, SCHEDULED
from benchmarks.modserve.paper import ASSUMED, GPUS, MODELS, PAPER, STEPS
from trimtab.report import html_page
from trimtab.report.html_page import Charts
from trimtab.report.summary import SummaryItem

HEADS: Final = ("model", "system", "most load, requests/s", "over monolith", "mean first token", "P99", "paper")
_COLOURS: Final = ("#868d98", "#b0691c", "#e08a2e", "#9b7fd9", "#3f7fd9", "#5a9a6a")
_BESIDE: Final = (MONOLITH, ROUTED, OURS)


def result_rows(evaluation: Evaluation) -> list[tuple[str, ...]]:
    """Rows of the table: one a model and system; seconds at twice what the monolith carries."""
    rows: list[tuple[str, ...]] = []
    for model, profile in enumerate(MODELS):
        for system in SYSTEMS:
            at = evaluation.step(model, system, 2.0)
            printed, beside = STEPS.get(system.name, ("", ""))
            rows.append(
                (
                    profile.name,
                    system.name,
                    f"{evaluation.number('most', model, system, GPUS):.2f}",
                    f"{evaluation.gain(model, system):.2f} x",
                    f"{at.mean_seconds:.2f}",
                    f"{at.p99_seconds:.2f}",
                    f"{printed} {beside}".strip(),
                )
            )
    return rows


def render(evaluation: Evaluation) -> str:
    """The page."""
    drawn: Charts = {}
    lead = f"128 GPUs, simulated · minutes of the trace: {evaluation.trace} · seconds in times of one image alone"
    body = [f"<h1>ModServe's evaluation, simulated</h1><p class='lead'>{escape(lead)}</p>"]
    body.append(html_page.summary_grid(_cards(evaluation)))
    sections = (
        ("Step by step", "P99 of the time to the first token by load, as shares of what the monolith carries.", _steps),
        ("Images a request", "Most load within the promise by images of each image request.", _images),
        ("Looser promises", "Most load by promise, in times of what a request of its kind takes alone.", _factors),
        (
            "Hours with a burst",
            "GPUs in use, both following the load; a third of the time requests bring more images.",
            _day,
        ),
    )
    body += [html_page.section(title, words, chart(evaluation), drawn) for title, words, chart in sections]
    table = html_page.table(HEADS, result_rows(evaluation), numbers=range(2, 6))
    body.append(
        f"<section><h2>All figures</h2><p class='note'>Seconds at twice the monolith's load.</p>{table}</section>"
    )
    body.append(f"<section><h2>What is assumed</h2><p class='note'>{escape(ASSUMED)}.</p></section>")
    return html_page.page("ModServe's evaluation · Trimtab", body, drawn)


def _cards(evaluation: Evaluation) -> list[SummaryItem]:
    cards = []
    for model, profile in enumerate(MODELS):
        kind = "decoder-only" if profile.decoder_only else "cross-attention"
        over, fewer = evaluation.gain(model, OURS), evaluation.fewer_gpus(model)
        marks = PAPER[f"throughput, {kind}"], PAPER[f"fewer GPUs, {kind}"]
        cards.append(
            SummaryItem(
                f"load, {kind}", f"{over:.2f} x", f"over the monolith; the paper: {marks[0]} x", over >= marks[0]
            )
        )
        words = f"following the load; the paper: {100 * marks[1]:.0f} %"
        cards.append(SummaryItem(f"fewer GPUs, {kind}", f"{100 * fewer:.0f} %", words, fewer >= marks[1]))
    return cards


def _steps(evaluation: Evaluation) -> go.Figure:
    shown = (MONOLITH, DECOUPLED, SCHEDULED, ROUTED, OURS)
    figure = _apart()
    for column, _ in enumerate(MODELS):
        for system in shown:
            values = [evaluation.step(column, system, share).p99_seconds for share in LOADS]
            _add(figure, column, system.name, SYSTEMS.index(system), LOADS, values)
    return _laid_out(figure, "load, in what the monolith carries", "P99 first token", log=True)


def _images(evaluation: Evaluation) -> go.Figure:
    figure = _apart()
    for column, _ in enumerate(MODELS):
        for system in _BESIDE:
            values = [evaluation.number("images", column, system, count) for count in IMAGE_COUNTS]
            names = [str(count) for count in IMAGE_COUNTS]
            _add(figure, column, system.name, SYSTEMS.index(system), names, values)
    return _laid_out(figure, "images", "requests/s")


def _factors(evaluation: Evaluation) -> go.Figure:
    figure = _apart()
    for column, _ in enumerate(MODELS):
        for system in _BESIDE:
            values = [evaluation.number("factor", column, system, factor) for factor in FACTORS]
            _add(figure, column, system.name, SYSTEMS.index(system), FACTORS, values)
    return _laid_out(figure, "promise", "requests/s")


def _day(evaluation: Evaluation) -> go.Figure:
    figure = _apart()
    for column, _ in enumerate(MODELS):
        for system in (MONOLITH, OURS):
            used = evaluation.day(column, system).gpus
            _add(figure, column, system.name, SYSTEMS.index(system), range(len(used)), used)
        encoders = evaluation.day(column, OURS).image_gpus
        _add(figure, column, "of ours, encoders", 3, range(len(encoders)), encoders)
    return _laid_out(figure, "minutes", "GPUs")


def _apart() -> go.Figure:
    return make_subplots(rows=1, cols=len(MODELS), subplot_titles=[profile.name for profile in MODELS])


def _add(figure: go.Figure, column: int, name: str, colour: int, x: Iterable[object], y: Iterable[float]) -> None:
    line = {"color": _COLOURS[colour], "width": 3 if name == OURS.name else 1.5}
    trace = go.Scatter(x=list(x), y=list(y), name=name, line=line, legendgroup=name, showlegend=column == 0)
    figure.add_trace(trace, row=1, col=column + 1)


def _laid_out(figure: go.Figure, across: str, up: str, *, log: bool = False) -> go.Figure:
    laid_out(figure).update_xaxes(title_text=across)
    if log:
        figure.update_yaxes(type="log", rangemode="normal")
    figure.update_yaxes(title_text=up, row=1, col=1)
    return figure
