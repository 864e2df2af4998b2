"""The charts of the evaluation, of what was simulated and of what was served alike."""

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from benchmarks.evaluating import laid_out
from benchmarks.otas.beside import Beside
from benchmarks.otas.evaluation import Evaluation
from benchmarks.otas.measured import BIN_SECONDS
from benchmarks.otas.methods import OTAS, OURS

TYPES = ("right in time", "wrong in time", "late", "evicted")
TYPE_COLOURS = ("#3f9a5f", "#e0b43e", "#e08a2e", "#cf4b4b")
METHOD_COLOURS = ("#3f7fd9", "#9b7fd9", "#868d98", "#5f6670", "#b0691c", "#e08a2e", "#5a9a6a")
NAMES_PIXELS = 130
"""Below a chart whose bars are methods: the longest name stands there aslant."""
POINT_COLOURS = ("#8c2d2d", "#cf4b4b", "#e08a2e", "#e0b43e", "#868d98", "#7fb0f0", "#3f7fd9", "#1f4f99")


def types(evaluation: Evaluation, methods: Sequence[str]) -> go.Figure:
    """What became of the queries, by load and method."""
    loads = evaluation.workloads
    figure = make_subplots(rows=1, cols=len(loads), subplot_titles=loads)
    for column, workload in enumerate(loads, 1):
        for place, (name, colour) in enumerate(zip(TYPES, TYPE_COLOURS, strict=True)):
            values = [100 * evaluation.type_share(workload, method, place) for method in methods]
            bars = go.Bar(
                x=list(methods), y=values, name=name, marker_color=colour, legendgroup=name, showlegend=column == 1
            )
            figure.add_trace(bars, row=1, col=column)
    figure.update_layout(barmode="stack")
    figure.update_yaxes(title_text="queries, %", row=1, col=1)
    return laid_out(figure, below=NAMES_PIXELS)


def by_load(evaluation: Evaluation, methods: Sequence[str]) -> go.Figure:
    """Utility beside that of OTAS as printed, by what a load was multiplied by."""
    loads = evaluation.workloads
    figure = make_subplots(rows=1, cols=len(loads), subplot_titles=loads)
    for column, workload in enumerate(loads, 1):
        factors = evaluation.factors(workload)
        for method, colour in zip(methods, METHOD_COLOURS, strict=False):
            values = [100 * (1 + evaluation.gain(workload, OTAS, factor, ours=method)) for factor in factors]
            line = {"color": colour, "width": 3 if method == OURS else 1.5}
            trace = go.Scatter(x=factors, y=values, name=method, line=line, legendgroup=method, showlegend=column == 1)
            figure.add_trace(trace, row=1, col=column)
        figure.update_xaxes(title_text="load", row=1, col=column)
    figure.update_yaxes(title_text="utility, % of OTAS", row=1, col=1)
    return laid_out(figure)


def over_time(evaluation: Evaluation, workload: str, points: Sequence[str]) -> go.Figure:
    """Which share each point answered while time went on, by ours and by OTAS as printed."""
    figure = make_subplots(
        rows=1, cols=2, subplot_titles=[OURS, OTAS], specs=[[{"secondary_y": True}, {"secondary_y": True}]]
    )
    for column, method in enumerate((OURS, OTAS), 1):
        series = evaluation.example(workload, method).over_time
        seconds = [BIN_SECONDS * place for place in range(len(series))]
        for point, colour in zip(points, POINT_COLOURS, strict=False):
            shares = [100 * shares.get(point, 0.0) for _, shares in series]
            area = go.Scatter(
                x=seconds,
                y=shares,
                name=point.removeprefix("g"),
                stackgroup="points",
                line={"width": 0},
                fillcolor=colour,
                legendgroup=point,
                showlegend=column == 1,
            )
            figure.add_trace(area, row=1, col=column)
        load = go.Scatter(
            x=seconds,
            y=[rps for rps, _ in series],
            name="queries/s",
            line={"color": "#222", "width": 1.5},
            showlegend=column == 1,
        )
        figure.add_trace(load, row=1, col=column, secondary_y=True)
        figure.update_xaxes(title_text="seconds", row=1, col=column)
    figure.update_yaxes(title_text="answers, %", row=1, col=1, secondary_y=False)
    return laid_out(figure)


def accuracies(evaluation: Evaluation, methods: Sequence[str]) -> go.Figure:
    """How many of the answers in time were expected to be no more accurate."""
    loads = evaluation.workloads
    figure = make_subplots(rows=1, cols=len(loads), subplot_titles=loads)
    for column, workload in enumerate(loads, 1):
        for method, colour in zip(methods, METHOD_COLOURS, strict=False):
            quantiles = evaluation.example(workload, method).accuracies
            shares = [100 * place / (len(quantiles) - 1) for place in range(len(quantiles))]
            trace = go.Scatter(
                x=list(quantiles),
                y=shares,
                name=method,
                line={"color": colour},
                legendgroup=method,
                showlegend=column == 1,
            )
            figure.add_trace(trace, row=1, col=column)
        figure.update_xaxes(title_text="expected accuracy", row=1, col=column)
    figure.update_yaxes(title_text="answers, %", row=1, col=1)
    return laid_out(figure)


def beside(found: Beside) -> go.Figure:
    """Utility by what labels say, by what answers promised, and simulated."""
    loads = found.evaluation.workloads
    figure = make_subplots(rows=1, cols=len(loads), subplot_titles=loads)
    for column, workload in enumerate(loads, 1):
        shown = [one for one in found.served if one.cell.workload == workload]
        ways = {
            "served, by labels": [one.run.utility for one in shown],
            "served, by promise": [one.run.expected_utility for one in shown],
            "simulated": [one.simulated.utility for one in shown],
        }
        for (name, values), colour in zip(ways.items(), METHOD_COLOURS, strict=False):
            bars = go.Bar(
                x=[one.cell.method for one in shown],
                y=values,
                name=name,
                marker_color=colour,
                legendgroup=name,
                showlegend=column == 1,
            )
            figure.add_trace(bars, row=1, col=column)
    figure.update_layout(barmode="group")
    figure.update_yaxes(title_text="utility", row=1, col=1)
    return laid_out(figure, below=NAMES_PIXELS)
