"""Charts of the pages: panels side by side, whose traces of one name share their place in the legend."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from benchmarks.harness.grid import AnyRow, Evaluation
from trimtab.report.html_page import OWN_X_AXIS

GRID = "rgba(134,141,152,0.25)"
SLANTED_NAMES_PIXELS = 130
"""Space below a chart whose x axis lists long names."""
Case = tuple[str, ...]
Panel = tuple[str, Iterable[go.Scatter | go.Bar]]
"""A title and the traces below it."""


def line(name: str, x: Iterable[object], y: Iterable[float], colour: str, *, bold: bool = False, **more: Any) -> Any:
    return go.Scatter(x=list(x), y=list(y), name=name, line={"color": colour, "width": 3 if bold else 1.5}, **more)


def bars(name: str, x: Iterable[object], y: Iterable[float], colour: str, **more: Any) -> go.Bar:
    return go.Bar(x=list(x), y=list(y), name=name, marker_color=colour, **more)


def panels(columns: Sequence[Panel], *, x: str = "", y: str = "", **layout: Any) -> go.Figure:
    """Return a chart with one panel a column; `x` is the title of every x axis, `y` of the first y axis."""
    figure = make_subplots(rows=1, cols=len(columns), subplot_titles=[title for title, _ in columns])
    listed = set[str]()
    for column, (_, traces) in enumerate(columns, 1):
        for trace in traces:
            trace.update(legendgroup=trace.name, showlegend=trace.name not in listed)
            figure.add_trace(trace, row=1, col=column)
            listed.add(trace.name)
        figure.update_xaxes(title_text=x, row=1, col=column)
    figure.update_yaxes(title_text=y, row=1, col=1)
    return style(figure, **layout)


def lines_by_load(
    evaluation: Evaluation[AnyRow],
    cases: Mapping[str, Case],
    colours: Mapping[str, str],
    figure: Callable[[Case, str, float], float],
    **layout: Any,
) -> go.Figure:
    """Return lines over the loads, one a method, in a titled panel for each case; `figure` takes method and load.

    The line of the first method is bold.
    """
    first = next(iter(colours))
    columns = [
        (
            title,
            [
                line(method, loads, [figure(case, method, load) for load in loads], colour, bold=method == first)
                for loads in [evaluation.factors(case)]
                for method, colour in colours.items()
            ],
        )
        for title, case in cases.items()
    ]
    return panels(columns, x="load", **layout)


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
