"""Plots that compare the policies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from benchmarks.evaluating import laid_out
from benchmarks.mosel.cells import METHODS, OURS, Measured
from benchmarks.mosel.evaluation import Evaluation

COLOURS = dict(
    zip(
        METHODS,
        ("#3f7fd9", "#7fb0f0", "#9b7fd9", "#5a9a6a", "#cf4b4b", "#868d98", "#e08a2e", "#b0691c"),
        strict=True,
    )
)


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot among others: its title, and whose cells of which model it shows."""

    title: str
    evaluation: Evaluation
    model: str


def by_load(
    panels: Sequence[Panel], methods: Sequence[str], of: Callable[[Measured], float], title: str, *, alike: bool = False
) -> go.Figure:
    """A line a policy in each panel, over the loads; `alike`: their axes have one scale."""
    names = [panel.title for panel in panels]
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=names, shared_yaxes="all" if alike else False)
    for column, panel in enumerate(panels, 1):
        factors = panel.evaluation.factors
        for method in methods:
            trace = go.Scatter(
                x=factors,
                y=[panel.evaluation.mean(panel.model, method, of, factor) for factor in factors],
                name=method,
                mode="lines+markers",
                line={"color": COLOURS[method], "width": 3 if method == OURS else 1.5},
                legendgroup=method,
                showlegend=column == 1,
            )
            figure.add_trace(trace, row=1, col=column)
        figure.update_xaxes(title_text="load", row=1, col=column)
    figure.update_yaxes(title_text=title, row=1, col=1)
    return laid_out(figure, below=56)


def carried(panels: Sequence[Panel], methods: Sequence[str], title: str) -> go.Figure:
    """What each policy carries with one violation in a hundred: bars pale but for the first panel."""
    figure = go.Figure()
    for number, panel in enumerate(panels):
        figure.add_bar(
            x=list(methods),
            y=[panel.evaluation.carried_rps(panel.model, method) for method in methods],
            name=panel.title,
            marker={"color": [COLOURS[method] for method in methods], "opacity": 1.0 if number == 0 else 0.45},
        )
    figure.update_yaxes(title_text=title)
    figure.update_layout(showlegend=False)  # its swatches would all have the first policy's colour
    return laid_out(figure, below=56)
