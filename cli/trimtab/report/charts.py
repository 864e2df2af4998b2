"""Charts of the report. Lines differ in dash and width as well as in colour, for greyscale prints."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from trimtab.report import series
from trimtab.report.row_series import row_bins, share_curves
from trimtab.report.series import Curve
from trimtab.run_samples import Run
from trimtab_pipelines.row_shares import describe_answer

BLUE, ORANGE, GREY, RED = "#3f7fd9", "#e08a2e", "#868d98", "#cf4b4b"
RUN_COLOURS = (BLUE, GREY, ORANGE)
RUN_DASHES = ("solid", "dot", "dash")
REASON_STYLES = ((RED, ""), (ORANGE, "/"), ("#8a6fc9", "x"), ("#5a9a6a", "."), (GREY, "-"), ("#b08a5a", "+"))
VARIANT_COLOURS = ("#9ec2f2", "#f0b878", "#7fbf8e", "#b39ddb", "#d98f8f", "#8fc7c7")
INK = "#3a3f47"
ALL_ROWS = 0.995
"""Share from which a line would lie on the chart's upper edge."""
HEIGHT = 260
_GRID = "rgba(134,141,152,0.25)"


def load_chart(run: Run) -> go.Figure:
    figure = _figure(run, "requests per second")
    _line(
        figure, series.observed_load(run), "received", BLUE, width=1.6, fill="tozeroy", fillcolor="rgba(63,127,217,.15)"
    )
    planned, sources = series.planned_load(run)
    name = "planned for" + (f" ({', '.join(sorted(set(sources)))})" if sources else "")
    _line(figure, planned, name, ORANGE, width=2.2, dash="dash", shape="hv")
    return figure


def stage_chart(run: Run, stage: str) -> go.Figure:
    """Variant of a stage, the least accurate at the bottom, its batch size and its replicas."""
    variants = sorted(run.pipeline.spec.stage(stage).variants, key=lambda v: (v.accuracy, v.name))
    names = [variant.name for variant in variants]
    titles = ("variant", "batch size", "ready replicas")
    figure = make_subplots(
        rows=3, shared_xaxes=True, vertical_spacing=0.1, row_heights=[0.5, 0.25, 0.25], subplot_titles=titles
    )
    figure.update_annotations(x=0, xanchor="left", font={"size": 13})
    spans = series.variant_spans(run, stage)
    at = np.array([time for span in spans for time in (span.start, span.end)])
    states = [(s.stage.variant, s.stage.batch_size, s.stage.ready_replicas) for s in spans for _ in ("start", "end")]
    styles = ((BLUE, 4.0), (ORANGE, 2.0), (GREY, 2.0))
    for row, (name, (colour, width)) in enumerate(zip(titles, styles, strict=True), 1):
        values = [state[row - 1] for state in states]
        trace = go.Scatter(x=at, y=values, name=name, mode="lines", line={"color": colour, "width": width})
        figure.add_trace(trace, row=row, col=1)
    figure.update_yaxes(categoryorder="array", categoryarray=names, range=[-0.5, len(names) - 0.5], row=1, col=1)
    figure.update_yaxes(rangemode="tozero", nticks=4, row=2, col=1)
    figure.update_yaxes(rangemode="tozero", nticks=4, dtick=_replica_step(spans), row=3, col=1)
    _apply_layout(figure, run, height=HEIGHT + 80 + 14 * len(names), legend=False)
    for row in (1, 2):
        figure.update_xaxes(title_text="", row=row, col=1)
    return figure


def rows_chart(run: Run, stage: str) -> go.Figure | None:
    """Shares of a stage's rows by the variant that answers them; None if a single point answers and should answer all.

    An expected share is a dashed line, on top of those below it.
    """
    curves = share_curves(run, stage, row_bins(run, stage))
    if len(curves) < 2:
        return None
    figure = _figure(run, "share of rows")
    variants = list(dict.fromkeys(key.variant for key in curves))
    expected_top = np.zeros(0)
    for key, (measured, expected) in curves.items():
        colour = VARIANT_COLOURS[variants.index(key.variant) % len(VARIANT_COLOURS)]
        area: dict[str, Any] = {"stackgroup": "rows", "fillcolor": colour}
        if key.escalated:
            area["fillpattern"] = {"shape": "/", "bgcolor": colour, "fgcolor": INK, "size": 6, "solidity": 0.2}
        _line(figure, measured, describe_answer(key), colour, width=0.5, **area)
        expected_top = expected.value + (expected_top if expected_top.size else 0.0)
        edge = Curve(expected.at, np.where((expected.value > 0) & (expected_top < ALL_ROWS), expected_top, np.nan))
        if not np.isnan(edge.value).all():
            _line(figure, edge, "expected", INK, width=1.6, dash="dash", shape="hvh", **_once(figure, "expected"))
    figure.update_yaxes(range=[0, 1], tickformat=".0%")
    return figure


def _once(figure: go.Figure, name: str) -> dict[str, Any]:
    """Attributes of a trace whose name the legend shows once."""
    return {"legendgroup": name, "showlegend": all(trace.name != name for trace in figure.data)}


def latency_chart(run: Run) -> go.Figure:
    figure = _figure(run, "milliseconds")
    median, p99 = series.latencies(run, (0.5, 0.99))
    _line(figure, _scaled(p99, 1000), "p99", BLUE, width=2.2)
    _line(figure, _scaled(median, 1000), "median", GREY, width=1.8, dash="dot")
    slo_ms = 1000 * run.pipeline.spec.slo.latency_seconds
    _limit(figure, slo_ms, f"SLO {slo_ms:g} ms")
    values = p99.value[~np.isnan(p99.value)]
    top = max(slo_ms, 1000 * float(values.max()) if values.size else 0.0)
    figure.update_yaxes(range=[0, 1.15 * top])
    return figure


def lost_chart(run: Run) -> go.Figure | None:
    """Requests not answered in time, by reason; None if there are none."""
    curves = series.lost_requests(run)
    if not curves:
        return None
    figure = _figure(run, "requests")
    for n, (reason, curve) in enumerate(curves.items()):
        colour, pattern = REASON_STYLES[n % len(REASON_STYLES)]
        marker = {"color": colour, "pattern": {"shape": pattern}, "line": {"width": 0}}
        figure.add_trace(go.Bar(x=curve.at, y=curve.value, name=reason, marker=marker))
    figure.update_layout(barmode="stack", bargap=0.05, showlegend=True)
    return figure


def accuracy_chart(run: Run) -> go.Figure:
    figure = _figure(run, "accuracy")
    expected, measured = series.accuracies(run)
    _line(figure, expected, "expected", ORANGE, width=2.2, dash="dash")
    _line(figure, measured, "measured", BLUE, width=1.6, mode="lines+markers")
    values = np.concatenate([expected.value, measured.value])
    values = values[~np.isnan(values)]
    if values.size:  # noise of a constant accuracy is not magnified
        margin = 0.02 + 0.05 * float(values.max() - values.min())
        figure.update_yaxes(range=[max(0.0, float(values.min()) - margin), min(1.005, float(values.max()) + margin)])
    return figure


def cores_chart(run: Run) -> go.Figure:
    figure = _figure(run, "cores")
    reserved, busy = series.cores(run)
    _line(figure, reserved, "reserved by replicas", BLUE, width=2.2, shape="hv")
    _line(figure, busy, "used by their processes", GREY, width=1.6, dash="dot")
    budget = run.pipeline.spec.budget
    surge = f" (+{budget.surge_cores:g} during rollouts)" if budget.surge_cores else ""
    _limit(figure, budget.cores, f"budget {budget.cores:g}{surge}")
    top = max([budget.cores + budget.surge_cores, *reserved.value, *busy.value])
    figure.update_yaxes(range=[0, 1.2 * top])
    return figure


def comparison_charts(runs: Sequence[Run]) -> list[tuple[str, go.Figure]]:
    accuracy, latency = _figure(runs[0], "measured accuracy"), _figure(runs[0], "milliseconds")
    for run, colour, dash in zip(runs, RUN_COLOURS, RUN_DASHES, strict=False):
        _line(accuracy, series.accuracies(run)[1], run.title, colour, width=2.2, dash=dash)
        (p99,) = series.latencies(run, (0.99,))
        _line(latency, _scaled(p99, 1000), run.title, colour, width=2.2, dash=dash)
    slo_ms = 1000 * runs[0].pipeline.spec.slo.latency_seconds
    _limit(latency, slo_ms)
    return [("Measured accuracy", accuracy), (f"p99 latency (dashed red: SLO of {slo_ms:g} ms)", latency)]


def _figure(run: Run, unit: str) -> go.Figure:
    figure = go.Figure()
    _apply_layout(figure, run, height=HEIGHT, legend=True)
    figure.update_yaxes(title_text=unit, rangemode="normal" if "accuracy" in unit else "tozero")
    return figure


def _apply_layout(figure: go.Figure, run: Run, *, height: int, legend: bool) -> None:
    length = max(series.seconds(run), 1.0)
    figure.update_layout(
        height=height,
        margin={"l": 96, "r": 24, "t": 34 if legend else 24, "b": 40},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13, "color": GREY},
        showlegend=legend,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        hovermode="x unified",
    )
    figure.update_xaxes(range=[0, length], gridcolor=_GRID, zeroline=False, automargin=False)
    figure.update_xaxes(title_text="seconds", title_standoff=6)
    figure.update_yaxes(gridcolor=_GRID, zeroline=False, automargin=False, title_standoff=8)
    _mark_faults(figure, run)


def _mark_faults(figure: go.Figure, run: Run) -> None:
    for fault in run.faults:
        at = fault.at - run.started_at
        if 0 <= at <= series.seconds(run):
            figure.add_vline(x=at, line={"color": RED, "width": 1, "dash": "dot"}, opacity=0.6)


def _line(
    figure: go.Figure,
    curve: Curve,
    name: str,
    colour: str,
    *,
    width: float,
    dash: str = "solid",
    shape: str = "linear",
    mode: str = "lines",
    **more: Any,
) -> None:
    line = {"color": colour, "width": width, "dash": dash, "shape": shape}
    trace = go.Scatter(x=curve.at, y=curve.value, name=name, mode=mode, line=line, marker={"size": 4}, **more)
    figure.add_trace(trace)


def _limit(figure: go.Figure, value: float, label: str = "") -> None:
    figure.add_hline(y=value, line={"color": RED, "width": 1.6, "dash": "dash"})
    figure.add_annotation(x=1, xref="paper", y=value, text=label, showarrow=False, xanchor="right", yanchor="bottom")


def _scaled(curve: Curve, factor: float) -> Curve:
    return Curve(curve.at, curve.value * factor)


def _replica_step(spans: Sequence[series.VariantSpan]) -> int:
    return max(1, -(-max((span.stage.ready_replicas for span in spans), default=1) // 4))
