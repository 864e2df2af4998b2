"""The page of `trimtab explain`: where the plan lies among all that could be, and what its neighbours cost."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

import plotly.graph_objects as go

from trimtab.plan_view import (
    ALTERNATIVE_COLUMNS,
    POINT_COLUMNS,
    PRICE_COLUMNS,
    STAGE_COLUMNS,
    PlanView,
    alternative_rows,
    explanation_lines,
    plan_estimate,
    point_rows,
    price_rows,
    stage_rows,
)
from trimtab.report import html_page
from trimtab.report.charts import BLUE, GREY, ORANGE, RED
from trimtab.report.html_page import Charts
from trimtab.report.summary import SummaryItem
from trimtab_adapter.planning.explain import describe_option
from trimtab_adapter.planning.planning_problem import PlanningProblem
from trimtab_adapter.planning.sensitivity import PlanEstimate, cores_curve, latency_curve
from trimtab_adapter.solvers.program import Program
from trimtab_pipelines.documents import write_atomically
from trimtab_pipelines.spec import InferencePipeline

HEIGHT = 430
ROOM = 2.0  # how far beyond the budget and the SLO the curves go
CORES_NOTE = "The most accurate plan for so many cores at this load; half and double the SLO show what latency costs."
LATENCY_NOTE = "The most accurate plan for each latency, within the budget and with half and double the cores."
_GRID = "rgba(134,141,152,0.25)"
_DASHES = ("dot", "solid", "dash")
_FACTORS = (0.5, 1.0, 2.0)


def write_plan_page(path: Path, pipeline: InferencePipeline, decision: PlanView) -> None:
    """Write the page of a decision."""
    write_atomically(path, render(pipeline, decision))


def render(pipeline: InferencePipeline, decision: PlanView) -> str:
    """The page as HTML."""
    drawn: Charts = {}
    load_rps = decision.problem.load_rps
    title = f"{pipeline.name} at {load_rps:g} requests/s"
    body = [
        f"<h1>{escape(title)}</h1><p class='lead'>{escape(_lead(decision.problem))}</p>",
        html_page.summary_grid(_cards(decision)),
        html_page.section("Accuracy against cores", CORES_NOTE, _cores_chart(decision), drawn),
        html_page.section("Accuracy against latency", LATENCY_NOTE, _latency_chart(decision), drawn),
        _tables(pipeline, decision),
    ]
    return html_page.page(f"{title} · Trimtab", body, drawn)


def _lead(question: PlanningProblem) -> str:
    spec = question.spec
    stages = " → ".join(stage.name for stage in spec.ordered_stages)
    gpus = f" and {spec.budget.gpus} GPUs" if spec.budget.gpus else ""
    slo = f"{spec.slo.quantile:.0%} within {1000 * spec.slo.latency_seconds:g} ms"
    return f"{stages} · {slo} · budget {spec.budget.cores:g} cores{gpus} · goal {spec.objective.goal}"


def _cards(decision: PlanView) -> list[SummaryItem]:
    now, why, spec = decision.now, decision.plan.spec.explanation, decision.problem.spec
    binds, _, gain = why.binding_constraint.partition(":")
    proof = "proven optimal" if why.gap <= 1e-6 else f"gap {why.gap:.3g}"
    second = why.runner_up
    return [
        SummaryItem("accuracy", f"{now.accuracy:.4f}", "product of the stages"),
        SummaryItem("cores", f"{now.cores:g}", f"of a budget of {spec.budget.cores:g}"),
        SummaryItem(
            "latency", f"{1000 * now.latency_seconds:.0f} ms", f"of an SLO of {1000 * spec.slo.latency_seconds:g} ms"
        ),
        SummaryItem("held back by", binds, gain.strip()),
        SummaryItem(
            "next best plan costs",
            "–" if second is None else f"{second.objective_loss:.4f}",
            "" if second is None else ", ".join(f"{stage}: {words}" for stage, words in second.stages.items()),
        ),
        SummaryItem("objective", f"{now.objective:.4f}", f"by {why.solver}, {proof}"),
    ]


def _tables(pipeline: InferencePipeline, decision: PlanView) -> str:
    stages = html_page.table(STAGE_COLUMNS, stage_rows(pipeline, decision.plan), numbers=range(2, len(STAGE_COLUMNS)))
    said = "".join(f"<p class='note'>{escape(words_)}</p>" for words_ in explanation_lines(decision.plan))
    prices = html_page.table(PRICE_COLUMNS, price_rows(decision), numbers=range(1, 5))
    points = point_rows(pipeline, decision.plan)
    listed = html_page.table(POINT_COLUMNS, points, numbers=range(2, 5)) if points else ""
    written = f"<section><h2>This plan</h2>{stages}{said}</section>"
    written += f"<section><h2>Operating points, preferred first</h2>{listed}</section>" if points else ""
    written += f"<section><h2>What the next step would cost</h2>{prices}</section>"
    if decision.alternatives:
        others = html_page.table(ALTERNATIVE_COLUMNS, alternative_rows(decision), numbers=range(1, 5))
        written += f"<section><h2>What if</h2>{others}</section>"
    return written


def _cores_chart(decision: PlanView) -> go.Figure:
    program = decision.solution.program
    figure = _figure("cores")
    for factor, dash in zip(_FACTORS, _DASHES, strict=True):
        changed = replace(program, slo_seconds=factor * program.slo_seconds)
        name = f"SLO {1000 * changed.slo_seconds:.4g} ms"
        points = cores_curve(changed, ROOM * program.cores)
        _curve(figure, changed, points, _cores, to=ROOM * program.cores, name=name, dash=dash)
    _limit(figure, program.cores, f"budget {program.cores:g}")
    _marks(figure, decision, _cores)
    return figure


def _latency_chart(decision: PlanView) -> go.Figure:
    program = decision.solution.program
    figure = _figure("latency, milliseconds")
    for factor, dash in zip(_FACTORS, _DASHES, strict=True):
        changed = replace(program, cores=factor * program.cores)
        points = latency_curve(changed, ROOM * program.slo_seconds)
        name, most = f"{changed.cores:g} cores", 1000 * ROOM * program.slo_seconds
        _curve(figure, changed, points, _milliseconds, to=most, name=name, dash=dash)
    _limit(figure, 1000 * program.slo_seconds, f"SLO {1000 * program.slo_seconds:g} ms")
    _marks(figure, decision, _milliseconds)
    return figure


def _cores(point: PlanEstimate) -> float:
    return point.cores


def _milliseconds(point: PlanEstimate) -> float:
    return 1000 * point.latency_seconds


def _curve(
    figure: go.Figure,
    program: Program,
    points: Sequence[PlanEstimate],
    across: Callable[[PlanEstimate], float],
    *,
    to: float,
    name: str,
    dash: str,
) -> None:
    solid = dash == "solid"
    if not points:
        return
    sizes = [7 if solid else 5] * len(points)
    figure.add_trace(
        go.Scatter(
            x=[*(across(point) for point in points), to],  # beyond the last point the curve stays level
            y=[*(point.accuracy for point in points), points[-1].accuracy],
            name=name,
            mode="lines+markers",
            line={"color": BLUE if solid else GREY, "width": 2.4 if solid else 1.6, "dash": dash, "shape": "hv"},
            marker={"size": [*sizes, 0]},
            text=[_hover(program, point) for point in (*points, points[-1])],
            hovertemplate="%{text}<extra>%{fullData.name}</extra>",
        )
    )


def _marks(figure: go.Figure, decision: PlanView, across: Callable[[PlanEstimate], float]) -> None:
    """Mark this plan and the alternatives."""
    others = [
        (
            alternative.name,
            alternative.solution.program,
            plan_estimate(alternative.problem, alternative.solution),
        )
        for alternative in decision.alternatives
        if alternative.solution is not None
    ]
    here = [("this plan", decision.solution.program, decision.now)]
    for name, listed, colour, symbol, size in (
        ("what if", others, ORANGE, "diamond", 10),
        ("this plan", here, RED, "star", 17),
    ):
        if listed:
            figure.add_trace(
                go.Scatter(
                    x=[across(point) for *_, point in listed],
                    y=[point.accuracy for *_, point in listed],
                    name=name,
                    mode="markers+text" if listed is others else "markers",
                    textposition="bottom center",
                    texttemplate="%{customdata}",
                    customdata=[what for what, *_ in listed],
                    marker={"color": colour, "symbol": symbol, "size": size, "line": {"width": 1, "color": "white"}},
                    text=[f"<b>{escape(what)}</b><br>{_hover(program, point)}" for what, program, point in listed],
                    hovertemplate="%{text}<extra></extra>",
                    cliponaxis=False,
                )
            )


def _hover(program: Program, point: PlanEstimate) -> str:
    lines = [f"{s.name}: {describe_option(option)}" for s, option in zip(program.stages, point.choice, strict=True)]
    figures = f"accuracy {point.accuracy:.4f}, cores {point.cores:g}, latency {_milliseconds(point):.1f} ms"
    return "<br>".join(escape(words_) for words_ in (figures, *lines))


def _limit(figure: go.Figure, at: float, words_: str) -> None:
    figure.add_vline(x=at, line={"color": RED, "width": 1.6, "dash": "dash"})
    figure.add_annotation(x=at, y=0, yref="paper", text=words_, showarrow=False, xanchor="left", yanchor="bottom")


def _figure(across: str) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        height=HEIGHT,
        meta=html_page.OWN_X_AXIS,
        margin={"l": 72, "r": 24, "t": 34, "b": 48},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13, "color": GREY},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        hovermode="closest",
    )
    figure.update_xaxes(title_text=across, gridcolor=_GRID, zeroline=False, rangemode="tozero", title_standoff=6)
    figure.update_yaxes(title_text="accuracy", gridcolor=_GRID, zeroline=False, title_standoff=8)
    return figure
