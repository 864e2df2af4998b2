"""Charts of the pages: panels side by side, whose traces of one name share their place in the legend."""

from collections.abc import Iterable, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from trimtab.report.html_page import OWN_X_AXIS

GRID = "rgba(134,141,152,0.25)"
SLANTED_NAMES_PIXELS = 130
"""Space below a chart whose x axis lists long names."""
Panel = tuple[str, Iterable[go.Scatter | go.Bar]]
"""A title and the traces below it."""


def line(name: str, x: Iterable[object], y: Iterable[float], colour: str, *, bold: bool = False, **more: Any) -> Any:
    return go.Scatter(x=list(x), y=list(y), name=name, line={"color": colour, "width": 3 if bold else 1.5}, **more)


def bars(name: str, x: Iterable[object], y: Iterable[float], colour: str, **more: Any) -> go.Bar:
    return go.Bar(x=list(x), y=list(y), name=name, marker_color=colour, **more)


def panels(
    columns: Sequence[Panel],
    *,
    x: str = "",
    y: str = "",
    second_axis: str | None = None,
    **layout: Any,
) -> go.Figure:
    """Return a chart with one panel a column.

    Args:
        columns: the panels.
        x: title of every x axis.
        y: title of the first y axis.
        second_axis: name of the traces that have a y axis of their own.
        layout: what `style` takes.
    """
    figure = make_subplots(
        rows=1,
        cols=len(columns),
        subplot_titles=[title for title, _ in columns],
        specs=[[{"secondary_y": second_axis is not None} for _ in columns]],
    )
    for column, (_, traces) in enumerate(columns, 1):
        add_traces(figure, traces, second_axis, row=1, col=column)
        figure.update_xaxes(title_text=x, row=1, col=column)
    figure.update_yaxes(title_text=y, row=1, col=1)
    return style(figure, **layout)


def add_traces(figure: go.Figure, traces: Iterable[Any], second_axis: str | None = None, **place: int) -> None:
    """Add traces to a panel; the legend lists each name once."""
    listed = {trace.name for trace in figure.data}
    for trace in traces:
        trace.update(legendgroup=trace.name, showlegend=trace.name not in listed)
        figure.add_trace(trace, **place, **({"secondary_y": True} if trace.name == second_axis else {}))
        listed.add(trace.name)


def style(figure: go.Figure, *, height: int = 420, below: int = 56, from_zero: bool = True) -> go.Figure:
    """Give a figure the look of all charts; `below` are the pixels below its panels."""
    figure.update_layout(
        height=height,
        meta=OWN_X_AXIS,
        margin={"l": 64, "r": 24, "t": 110, "b": below},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13, "color": "#868d98"},
        legend={"orientation": "h", "x": 0, "y": 1.14, "yanchor": "bottom"},
    )
    figure.update_xaxes(gridcolor=GRID, zeroline=False)
    figure.update_yaxes(gridcolor=GRID, zeroline=False, rangemode="tozero" if from_zero else "normal")
    return figure
