"""The evaluation as a table and as one HTML page that needs nothing else."""

from html import escape

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from benchmarks.evaluating import laid_out
from benchmarks.otas.cells import BURSTY, SYNTHETIC
from benchmarks.otas.evaluation import Evaluation
from benchmarks.otas.measured import BIN_SECONDS
from benchmarks.otas.methods import INFAAS, METHODS, OTAS, OURS, PETS, PETS_EVICTS, TOME, VPT
from benchmarks.otas.paper import ASSUMED
from trimtab.report import layout
from trimtab.report.layout import Charts
from trimtab.report.summary import Card

MOST = "of the most that any policy could have"
HEADS = ("load", "method", "utility", "ours beside it", MOST, "type 1", "type 2", "type 3", "type 4", "paper")
TYPES = ("right in time", "wrong in time", "late", "evicted")
TYPE_COLOURS = ("#3f9a5f", "#e0b43e", "#e08a2e", "#cf4b4b")
SHOWN = (OURS, OTAS, PETS, PETS_EVICTS, INFAAS, TOME, VPT)
METHOD_COLOURS = ("#3f7fd9", "#9b7fd9", "#868d98", "#5f6670", "#b0691c", "#e08a2e", "#5a9a6a")
POINTS = ("g-20", "g-15", "g-10", "g-5", "g0", "g2", "g4", "g8")
POINT_COLOURS = ("#8c2d2d", "#cf4b4b", "#e08a2e", "#e0b43e", "#868d98", "#7fb0f0", "#3f7fd9", "#1f4f99")
PRINTED = {
    (SYNTHETIC, OTAS): "type 1 85.54 %, nobody late or evicted",
    (SYNTHETIC, PETS): "OTAS 18.2 % above",
    (SYNTHETIC, INFAAS): "OTAS 72.5 % above",
    (BURSTY, OTAS): "type 1 75.58 % (MAF)",
    (BURSTY, VPT): "type 1 64.14 % (MAF)",
    (BURSTY, TOME): "type 2 16.85 % (MAF)",
}


def result_rows(evaluation: Evaluation) -> list[tuple[str, ...]]:
    """Rows of the table: one a load and method, at the paper's load."""
    rows: list[tuple[str, ...]] = []
    for workload in evaluation.workloads:
        for method, made in METHODS.items():
            types = [evaluation.type_share(workload, method, place) for place in range(4)]
            rows.append(
                (
                    workload,
                    method,
                    f"{evaluation.mean(workload, method, lambda one: one.utility):.0f}",
                    f"{100 * evaluation.gain(workload, method):+.1f} %" if method != OURS else "",
                    f"{100 * evaluation.of_ceiling(workload, method):.1f} %" if made.is_the_papers else "",
                    *(f"{100 * share:.2f} %" for share in types),
                    PRINTED.get((workload, method), ""),
                )
            )
    return rows


def render(evaluation: Evaluation) -> str:
    """The page."""
    drawn: Charts = {}
    lead = f"{len(evaluation.measured)} simulations · bursty load: {evaluation.trace}"
    body = [f"<h1>OTAS's evaluation, simulated</h1><p class='lead'>{escape(lead)}</p>"]
    body.append(layout.card_row(_cards(evaluation)))
    body.append(
        layout.section(
            "What became of the queries",
            "The paper's figure 13, at the paper's load: right in time (1), wrong in time (2), late (3), evicted (4). "
            "The paper prints for OTAS 85.54 % right on its synthetic load, 75.58 % on its trace.",
            _types(evaluation),
            drawn,
        )
    )
    body.append(
        layout.section(
            "Utility by load",
            "The paper's figures 9 and 10: utility in % of OTAS as printed; 1 is the paper's load.",
            _by_load(evaluation),
            drawn,
        )
    )
    body += [
        layout.section(
            f"Tokens over time, {workload}",
            "The paper's figure 12, over time: which share was answered at each number of tokens; line: load.",
            _over_time(evaluation, workload),
            drawn,
        )
        for workload in evaluation.workloads
    ]
    body.append(
        layout.section(
            "Accuracy of answers",
            "The paper's figure 11: how many of the answers in time were expected to be no more accurate.",
            _accuracies(evaluation),
            drawn,
        )
    )
    table = layout.table(HEADS, result_rows(evaluation), numbers=range(2, 9))
    body.append(f"<section><h2>All figures</h2><p class='note'>{escape(_CEILING)}</p>{table}</section>")
    note = escape(
        f"Printed by the paper and used as it is: throughputs at 0 and −15, both tables, the load. {_ASSUMED}"
    )
    body.append(f"<section><h2>What is the paper's, and what is assumed</h2><p class='note'>{note}</p></section>")
    return layout.page("OTAS's evaluation · Trimtab", body, drawn)


_CEILING = (
    "The most that any policy could have: a linear program's optimum on the same arrivals, in which batches may be "
    "parted, a query costs what it costs in the best batch, and all that comes is known beforehand. It is told of "
    "methods that choose among the paper's numbers of tokens alone: it bounds no other models, and nothing assumed."
)
_ASSUMED = (
    f"Assumed: {ASSUMED}. PetS knows no deadlines and drops nobody; beside it one that does. Second looks are not in "
    "the paper: the least certain share p is assumed to hold 1 − (1 − p)² of a gain. Nothing of that is judged."
)


def _cards(evaluation: Evaluation) -> list[Card]:
    gains = [
        (name, evaluation.gain(SYNTHETIC, name), evaluation.most_gain(SYNTHETIC, name))
        for name in (OTAS, PETS, PETS_EVICTS, INFAAS, TOME, VPT)
    ]
    right = evaluation.type_share(SYNTHETIC, OURS, 0)
    return [
        Card("right in time, synthetic", f"{100 * right:.1f} %", "the paper: 85.54 %", right >= 0.85),
        *(
            Card(
                f"utility over {name}", f"{100 * gain:+.1f} %", f"synthetic load; {100 * most:+.1f} % at most", gain > 0
            )
            for name, gain, most in gains
        ),
    ]


def _types(evaluation: Evaluation) -> go.Figure:
    loads = evaluation.workloads
    figure = make_subplots(rows=1, cols=len(loads), subplot_titles=loads)
    for column, workload in enumerate(loads, 1):
        for place, (name, colour) in enumerate(zip(TYPES, TYPE_COLOURS, strict=True)):
            values = [100 * evaluation.type_share(workload, method, place) for method in SHOWN]
            bars = go.Bar(
                x=list(SHOWN), y=values, name=name, marker_color=colour, legendgroup=name, showlegend=column == 1
            )
            figure.add_trace(bars, row=1, col=column)
    figure.update_layout(barmode="stack")
    figure.update_yaxes(title_text="queries, %", row=1, col=1)
    return laid_out(figure)


def _by_load(evaluation: Evaluation) -> go.Figure:
    loads = evaluation.workloads
    figure = make_subplots(rows=1, cols=len(loads), subplot_titles=loads)
    for column, workload in enumerate(loads, 1):
        factors = evaluation.factors(workload)
        for method, colour in zip(SHOWN, METHOD_COLOURS, strict=True):
            values = [100 * (1 + evaluation.gain(workload, OTAS, factor, ours=method)) for factor in factors]
            line = {"color": colour, "width": 3 if method == OURS else 1.5}
            trace = go.Scatter(x=factors, y=values, name=method, line=line, legendgroup=method, showlegend=column == 1)
            figure.add_trace(trace, row=1, col=column)
        figure.update_xaxes(title_text="load", row=1, col=column)
    figure.update_yaxes(title_text="utility, % of OTAS", row=1, col=1)
    return laid_out(figure)


def _over_time(evaluation: Evaluation, workload: str) -> go.Figure:
    figure = make_subplots(
        rows=1, cols=2, subplot_titles=[OURS, OTAS], specs=[[{"secondary_y": True}, {"secondary_y": True}]]
    )
    for column, method in enumerate((OURS, OTAS), 1):
        series = evaluation.example(workload, method).over_time
        seconds = [BIN_SECONDS * place for place in range(len(series))]
        for point, colour in zip(POINTS, POINT_COLOURS, strict=True):
            shares = [100 * shares.get(point, 0.0) for _, shares in series]
            area = go.Scatter(
                x=seconds,
                y=shares,
                name=point[1:],
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


def _accuracies(evaluation: Evaluation) -> go.Figure:
    loads = evaluation.workloads
    figure = make_subplots(rows=1, cols=len(loads), subplot_titles=loads)
    for column, workload in enumerate(loads, 1):
        for method, colour in zip(SHOWN, METHOD_COLOURS, strict=True):
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
