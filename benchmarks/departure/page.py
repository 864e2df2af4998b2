"""The figure: what is dropped and how accurate answers are, against the load, for each order of decisions."""

from collections.abc import Callable, Mapping, Sequence
from html import escape

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from benchmarks.departure.orders import CARRIED_RPS, CHEAPER, NEW, OLD, PLANNED
from benchmarks.departure.served import Served
from trimtab.report import layout
from trimtab.report.charts import BLUE, GREY, ORANGE, RED
from trimtab.report.layout import ALONE, Charts
from trimtab.report.summary import Card
from trimtab_adapter.simulation.result import SimulationResult
from trimtab_pipelines.request_outcome import DROPPED, REFUSED

TITLE = "A load whose heads only the cheaper operating point can meet"
NOTE = (
    "One replica, two operating points, every answer due after 100 ms. Lines: simulated. Crosses: a real router over "
    "HTTP, ten times slower. Dotted: the most that each point can carry."
)
COLOURS = {OLD: ORANGE, PLANNED: GREY, CHEAPER: RED, NEW: BLUE}
HEADS = ("order of decisions", "requests/s", "requests", "not answered", "late", "accuracy of answers")
Curves = Mapping[str, Mapping[float, SimulationResult]]
Points = Mapping[str, Mapping[float, Served]]


def dropped(found: SimulationResult) -> float:
    """The share of requests that got no answer."""
    return found.share(DROPPED) + found.share(REFUSED)


def render(curves: Curves, points: Points, cards: Sequence[Card]) -> str:
    """The page as HTML."""
    drawn: Charts = {}
    body = [
        f"<h1>{escape(TITLE)}</h1>",
        layout.card_row(cards),
        layout.section("Dropped, and how accurate the rest is", NOTE, _figure(curves, points), drawn),
        f"<section><h2>Served</h2>{layout.table(HEADS, rows(points), numbers=range(1, len(HEADS)))}</section>",
    ]
    return layout.page(f"{TITLE} · Trimtab", "\n".join(body), drawn)


def rows(points: Points) -> list[tuple[str, ...]]:
    """What was served, a row a run."""
    return [
        (
            order,
            f"{rate:g}",
            str(one.requests),
            f"{100 * one.dropped:.2f} %",
            f"{100 * one.late:.2f} %",
            f"{one.accuracy:.4f}",
        )
        for order, runs in points.items()
        for rate, one in runs.items()
    ]


def _figure(curves: Curves, points: Points) -> go.Figure:
    figure = make_subplots(rows=1, cols=2, subplot_titles=["dropped, %", "accuracy of what was answered"])
    for order, runs in curves.items():
        _line(figure, order, runs, 1, lambda one: 100 * dropped(one))
        _line(figure, order, runs, 2, lambda one: one.mean_accuracy)
    for order, served in points.items():
        _crosses(figure, order, served, 1, lambda one: 100 * one.dropped)
        _crosses(figure, order, served, 2, lambda one: one.accuracy)
    for name, rate_rps in CARRIED_RPS.items():
        figure.add_vline(x=rate_rps, line={"dash": "dot", "color": GREY, "width": 1}, annotation_text=name)
    figure.update_xaxes(title_text="requests/s", gridcolor="rgba(134,141,152,0.25)")
    figure.update_yaxes(gridcolor="rgba(134,141,152,0.25)")
    figure.update_layout(
        height=430,
        margin={"l": 50, "r": 20, "t": 50, "b": 90},
        legend={"orientation": "h", "y": -0.2},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        meta=ALONE,
    )
    return figure


def _line(
    figure: go.Figure,
    order: str,
    runs: Mapping[float, SimulationResult],
    column: int,
    of: Callable[[SimulationResult], float],
) -> None:
    line = go.Scatter(
        x=list(runs),
        y=[of(one) for one in runs.values()],
        name=order,
        legendgroup=order,
        showlegend=column == 1,
        line={"color": COLOURS[order], "width": 2},
    )
    figure.add_trace(line, row=1, col=column)


def _crosses(
    figure: go.Figure, order: str, runs: Mapping[float, Served], column: int, of: Callable[[Served], float]
) -> None:
    marker = {"symbol": "x-thin", "size": 10, "line": {"width": 2, "color": COLOURS[order]}}
    crosses = go.Scatter(
        x=list(runs),
        y=[of(one) for one in runs.values()],
        name=f"{order}, served",
        legendgroup=order,
        showlegend=False,
        mode="markers",
        marker=marker,
    )
    figure.add_trace(crosses, row=1, col=column)
