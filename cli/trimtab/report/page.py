"""Report of a run, or of several compared, as HTML."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Literal

from trimtab.options import console
from trimtab.plan_view import STAGE_COLUMNS, explanation_lines, stage_rows
from trimtab.report import charts, html_page, series
from trimtab.report.html_page import Charts, section, table
from trimtab.report.summary import COMPARISON_COLUMNS, comparison_rows, summary_items
from trimtab.run_samples import Run, stage_summaries
from trimtab_pipelines.accuracy import accuracy_sources
from trimtab_pipelines.documents import write_atomically

ACCURACY_NOTE = (
    "Expected: product of the {sources} accuracies of the variants that served each request. "
    "Measured: answers compared with the labels."
)
FOOTER = "<footer>Drag over a chart to zoom in, double-click to reset.</footer>"


def write_report(path: Path, runs: Sequence[Run]) -> None:
    """Write the report of the first run, compared with the others if there are any, and print its path."""
    write_atomically(path, render(runs))
    console.print(f"report: {path}")


def render(runs: Sequence[Run], state: Literal["live", "finished"] | None = None) -> str:
    """Render the report; without a run, the page says that nothing is recorded yet."""
    if not runs:
        return html_page.page("Trimtab", ["<p class='note'>No sample is recorded yet.</p>"], {}, state)
    drawn: Charts = {}
    run = runs[0]
    body = [_header(run), html_page.summary_grid(summary_items(run))]
    if len(runs) > 1:
        body.append(_comparison(runs, drawn))
    body += [*_chart_sections(run, drawn), _plan(run), _changes(run), _faults(run), FOOTER]
    return html_page.page(f"{run.title} · Trimtab", list(filter(None, body)), drawn, state)


def _header(run: Run) -> str:
    start = datetime.fromtimestamp(run.started_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    load = f"load {run.results.facts.load}, " if run.results else ""
    stages = " → ".join(stage.name for stage in run.pipeline.spec.ordered_stages)
    lead = f"{stages} · {load}{series.seconds(run):.0f} s from {start} · ready after {run.ready_seconds:.1f} s"
    return f"<h1>{escape(run.title)}</h1><p class='lead'>{escape(lead)}</p>"


def _chart_sections(run: Run, drawn: Charts) -> list[str]:
    accuracy_note = ACCURACY_NOTE.format(sources=accuracy_sources(run.pipeline.spec.stages))
    lost_chart = charts.lost_chart(run)
    lost_note = "All requests were answered in time." if lost_chart is None else "Requests by arrival time and reason."
    return [
        section("Load", "Requests received per second, and the peak planned for.", charts.load_chart(run), drawn),
        *(part for stage in run.pipeline.spec.ordered_stages for part in _stage_sections(run, stage.name, drawn)),
        section("Latency", "From the scheduled arrival to the end of the response.", charts.latency_chart(run), drawn),
        section("Requests not answered in time", lost_note, lost_chart, drawn),
        section("Accuracy", accuracy_note, charts.accuracy_chart(run), drawn),
        section("Cores", "Cores reserved by replicas, and used by their processes.", charts.cores_chart(run), drawn),
    ]


def _stage_sections(run: Run, stage: str, drawn: Charts) -> Iterator[str]:
    note = "Planned variant, the most accurate at the top, sampled each second."
    yield section(f"Stage {stage}", note, charts.stage_chart(run, stage), drawn)
    rows = charts.rows_chart(run, stage)
    if rows is not None:
        note = "Share of the rows that each variant answers. Hatched: rows that it answers after another variant."
        yield section(f"Rows of stage {stage}", f"{note} Dashed: expected by the plan.", rows, drawn)


def _comparison(runs: Sequence[Run], drawn: Charts) -> str:
    rows = table(COMPARISON_COLUMNS, comparison_rows(runs), numbers=range(1, len(COMPARISON_COLUMNS)))
    sections = "".join(section(title, "", chart, drawn) for title, chart in charts.comparison_charts(runs))
    note = "The same arrivals and payloads, one run after the other, on the same cores."
    return f"<section><h2>Comparison</h2><p class='note'>{note}</p>{rows}</section>{sections}"


def _plan(run: Run) -> str:
    if not run.plans:
        return ""
    plan = run.plans[-1]
    stages = table(STAGE_COLUMNS, stage_rows(run.pipeline, plan), numbers=range(2, len(STAGE_COLUMNS)))
    lines = "".join(f"<p class='note'>{escape(line)}</p>" for line in explanation_lines(plan))
    return f"<section><h2>Latest plan, {plan.spec.generation}</h2>{stages}{lines}</section>"


def _changes(run: Run) -> str:
    rows = []
    for plan in run.changes:
        at = plan.spec.created_at - run.started_at
        stages = "; ".join(f"{stage}: {summary}" for stage, summary in stage_summaries(plan).items())
        peak = f"{plan.spec.forecast.peak_rps:.1f}" if plan.spec.forecast else ""
        reason = plan.spec.explanation.change or plan.spec.reason
        if not plan.spec.feasible:
            reason = f"{reason} ({plan.spec.reason})"
        rows.append((f"{at:.0f} s", str(plan.spec.generation), peak, stages, reason))
    if not rows:
        return "<section><h2>Plan changes</h2><p class='note'>None.</p></section>"
    columns = ("time", "plan", "planned load", "stages", "reason")
    return f"<section><h2>Plan changes</h2>{table(columns, rows, numbers=range(3))}</section>"


def _faults(run: Run) -> str:
    if not run.faults:
        return ""
    rows = [(f"{fault.at - run.started_at:.1f} s", fault.what, fault.detail) for fault in run.faults]
    note = "Processes that failed and were restarted, and replicas that a router stopped using (dotted red lines)."
    faults = table(("time", "fault", "detail"), rows, numbers=range(1))
    return f"<section><h2>Faults</h2><p class='note'>{note}</p>{faults}</section>"
