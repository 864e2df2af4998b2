"""The evaluation's plots."""

import math
from collections.abc import Mapping

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from benchmarks.ipa import sweeps
from benchmarks.ipa.cells import BASELINES, METHODS, ORACLE, OURS, RANKS, REACTIVE
from benchmarks.ipa.evaluation import PAPER_NAMES, Evaluation
from benchmarks.ipa.verdict import interval
from trimtab.report.html_page import OWN_X_AXIS

COLOURS = {OURS: "#3f7fd9", RANKS: "#7fb0f0", REACTIVE: "#9b7fd9", ORACLE: "#2b4f8a"}
SYMBOLS = {OURS: "circle", RANKS: "circle-open", REACTIVE: "triangle-up", ORACLE: "triangle-down"}
BASELINE_COLOURS = dict(
    zip(BASELINES, ("#e08a2e", "#b0691c", "#cf4b4b", "#a33333", "#5a9a6a", "#3a7a4a", "#868d98"), strict=True)
)
_GRID = "rgba(134,141,152,0.25)"


def front(evaluation: Evaluation, pipeline: str) -> go.Figure:
    """Mean cores against mean served PAS, one panel a workload."""
    loads = [workload for name, workload in evaluation.pairs if name == pipeline]
    figure = make_subplots(rows=1, cols=len(loads), subplot_titles=[load.replace("_", " ") for load in loads])
    for column, workload in enumerate(loads, 1):
        for method in METHODS:
            cells = evaluation.results[pipeline, workload, method]
            colour = COLOURS.get(method) or BASELINE_COLOURS[method]
            marker = {"color": colour, "size": 11 if method == OURS else 9, "symbol": SYMBOLS.get(method, "square")}
            cores, accuracy = interval(c.cores for c in cells), interval(100 * c.served_accuracy for c in cells)
            figure.add_trace(_dot(method, cores.mean, accuracy.mean, marker, shown=column == 1), row=1, col=column)
            paper = evaluation.recorded.get((pipeline, workload, PAPER_NAMES.get(method, "")))
            if paper is not None:
                cross = {"color": colour, "size": 9, "symbol": "x-thin", "line": {"width": 2, "color": colour}}
                name = f"{PAPER_NAMES[method]}, paper"
                dot = _dot(name, paper.cores, 100 * paper.accuracy, cross, shown=column == 1)
                figure.add_trace(dot, row=1, col=column)
        figure.update_xaxes(title_text="cores", type="log", row=1, col=column)
    figure.update_yaxes(title_text="PAS × 100", row=1, col=1)
    return _dressed(figure, 420)


def _dot(name: str, x: float, y: float, marker: Mapping[str, object], *, shown: bool) -> go.Scatter:
    return go.Scatter(x=[x], y=[y], name=name, mode="markers", marker=marker, legendgroup=name, showlegend=shown)


def timeline(evaluation: Evaluation, pipeline: str) -> go.Figure:
    """Cores and PAS over time under the bursty load."""
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    for method in (OURS, "FA2-low", "FA2-high", "RIM"):
        cells = evaluation.results.get((pipeline, "bursty", method), [])
        for cell in cells[:1]:
            at, cores, accuracy, _ = zip(*cell.timeline, strict=True)
            line = {"color": COLOURS.get(method) or BASELINE_COLOURS[method], "width": 2, "shape": "hv"}
            figure.add_trace(go.Scatter(x=at, y=cores, name=method, line=line, mode="lines"), row=1, col=1)
            pas = [100 * value for value in accuracy]
            trace = go.Scatter(x=at, y=pas, name=method, line=line, mode="lines", showlegend=False)
            figure.add_trace(trace, row=2, col=1)
    figure.update_yaxes(title_text="cores", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="PAS × 100", row=2, col=1)
    figure.update_xaxes(title_text="seconds", row=2, col=1)
    return _dressed(figure, 380)


def ablation(evaluation: Evaluation) -> go.Figure:
    """Violations and cores by predictor."""
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    labels = [f"{pipeline}, {workload.replace('_', ' ')}" for pipeline, workload in evaluation.pairs]
    for method, name in ((OURS, "LSTM"), (REACTIVE, "reactive"), (ORACLE, "oracle")):
        cells = [evaluation.results[(*pair, method)] for pair in evaluation.pairs]
        lost = [interval(100 * one.violations for one in seeds) for seeds in cells]
        cores = [interval(one.cores for one in seeds) for seeds in cells]
        for row, found in ((1, lost), (2, cores)):
            halves = {"type": "data", "array": [0.0 if math.isnan(one.half) else one.half for one in found]}
            trace = go.Bar(x=labels, y=[one.mean for one in found], error_y=halves, name=name, showlegend=row == 1)
            figure.add_trace(trace.update(marker_color=COLOURS[method]), row=row, col=1)
    most = max(100 * one.violations for one in evaluation.measured if one.cell.method in {OURS, REACTIVE, ORACLE})
    figure.update_yaxes(title_text="late or dropped, %", range=[0, max(1.0, 1.2 * most)], row=1, col=1)
    figure.update_yaxes(title_text="cores", rangemode="tozero", row=2, col=1)
    return _dressed(figure, 560)


def sweep(evaluation: Evaluation) -> go.Figure:
    """The front our planner walks along as accuracy weighs more."""
    names = evaluation.pipelines
    figure = make_subplots(rows=1, cols=len(names), subplot_titles=names)
    for column, name in enumerate(names, 1):
        own = sorted(
            (c for c in evaluation.swept if c.cell.pipeline == name), key=lambda c: c.cell.accuracy_weight or 0.0
        )
        ours = go.Scatter(
            x=[c.cores for c in own],
            y=[100 * c.served_accuracy for c in own],
            text=[f"α = {c.cell.accuracy_weight:g}" for c in own],
            name="trimtab",
            mode="lines+markers",
            marker={"color": COLOURS[OURS]},
            showlegend=column == 1,
        )
        figure.add_trace(ours, row=1, col=column)
        points = sweeps.PUBLISHED_SWEEP[name]
        cross = {"color": BASELINE_COLOURS["FA2-low"], "symbol": "x-thin", "size": 9, "line": {"width": 2}}
        xs, ys = [c for c, _ in points], [100 * a for _, a in points]
        trace = go.Scatter(x=xs, y=ys, name="IPA, paper", mode="markers", marker=cross, showlegend=column == 1)
        figure.add_trace(trace, row=1, col=column)
        figure.update_xaxes(title_text="cores", type="log", row=1, col=column)
    figure.update_yaxes(title_text="PAS × 100", row=1, col=1)
    return _dressed(figure, 380)


def solver(evaluation: Evaluation) -> go.Figure:
    """Our solver's time beside the paper's."""
    figure = go.Figure()
    sizes = sorted(evaluation.solver_seconds)
    labels = [f"{stages} × {variants}" for stages, variants in sizes]
    ours = [1000 * evaluation.solver_seconds[size][0] for size in sizes]
    figure.add_trace(go.Bar(x=labels, y=ours, name="exact, here", marker_color=COLOURS[OURS]))
    paper = [1000 * sweeps.PUBLISHED_SOLVER_SECONDS.get(size, math.nan) for size in sizes]
    marker = {"color": BASELINE_COLOURS["FA2-low"], "symbol": "x-thin", "size": 11, "line": {"width": 3}}
    figure.add_trace(go.Scatter(x=labels, y=paper, name="Gurobi, paper's code", mode="markers", marker=marker))
    figure.update_yaxes(title_text="milliseconds", type="log")
    figure.update_xaxes(title_text="stages × variants")
    return _dressed(figure, 340)


def _dressed(figure: go.Figure, height: int) -> go.Figure:
    figure.update_layout(
        height=height,
        meta=OWN_X_AXIS,
        margin={"l": 64, "r": 24, "t": 96, "b": 56},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13, "color": "#868d98"},
        legend={"orientation": "h", "x": 0, "y": 1.12, "yanchor": "bottom"},
    )
    figure.update_xaxes(gridcolor=_GRID, zeroline=False)
    figure.update_yaxes(gridcolor=_GRID, zeroline=False)
    return figure
