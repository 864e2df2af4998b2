"""The report of a run, or of several compared, as a page."""

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from trimtab.plan_view import STAGE_COLUMNS, explanation_lines, stage_rows
from trimtab.report import charts, html_page, series
from trimtab.report.html_page import Charts
from trimtab.report.summary import COMPARED, comparison_rows, summary_items
from trimtab.run_samples import Run, stage_summaries
from trimtab_pipelines.accuracy import accuracy_sources
from trimtab_pipelines.documents import write_atomically

ACCURACY_NOTE = (
    "Expected: product of the accuracies of the variants that served each answer, which are {accuracy_sources}. "
    "Measured: answers compared with the truth."
)
FOOTER = "<footer>Drag over a chart to look closer, double-click to see all of it.</footer>"


def write_report(path: Path, runs: Sequence[Run]) -> None:
    """Write the page of a run; where there are several, the first is compared with the others."""
    write_atomically(path, render(runs))


def render(runs: Sequence[Run]) -> str:
    """The page as HTML."""
    drawn: Charts = {}
    return html_page.page(f"{runs[0].title} · Trimtab", parts(runs, drawn), drawn)


def parts(runs: Sequence[Run], drawn: Charts) -> list[str]:
    """What the page shows, one below the other; their charts are added to `drawn`."""
    run = runs[0]
    body = [_head(run), html_page.summary_grid(summary_items(run))]
    if len(runs) > 1:
        body.append(_comparison(runs, drawn))
    body += [
        *_sections(run, drawn),
        _plan(run),
        _changes(run),
        _faults(run),
        FOOTER,
    ]
    return list(filter(None, body))


def _head(run: Run) -> str:
    began = datetime.fromtimestamp(run.started_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    load = f"load {run.results.facts.load}, " if run.results else ""
    stages = " → ".join(stage.name for stage in run.pipeline.spec.ordered_stages)
    lead = f"{stages} · {load}{series.seconds(run):.0f} s from {began} · ready after {run.ready_seconds:.1f} s"
    return f"<h1>{escape(run.title)}</h1><p class='lead'>{escape(lead)}</p>"


def _sections(run: Run, drawn: Charts) -> list[str]:
    note = ACCURACY_NOTE.format(sources=accuracy_sources(run.pipeline.spec.stages))
    return [
        html_page.section("Load", "What came in each second, and the peak planned for.", charts.load_chart(run), drawn),
        *(_stage_section(run, stage.name, drawn) for stage in run.pipeline.spec.ordered_stages),
        html_page.section(
            "Latency", "From the scheduled arrival to the answer given.", charts.latency_chart(run), drawn
        ),
        _lost_section(run, drawn),
        html_page.section("Accuracy", note, charts.accuracy_chart(run), drawn),
        html_page.section(
            "Cores", "What replicas had reserved, what their processes used.", charts.cores_chart(run), drawn
        ),
    ]


def _stage_section(run: Run, stage: str, drawn: Charts) -> str:
    note = "As the router saw it, second by second; variants stand in order of their accuracy."
    return html_page.section(f"Stage {stage}", note, charts.stage_chart(run, stage), drawn)


def _lost_section(run: Run, drawn: Charts) -> str:
    chart = charts.lost_chart(run)
    note = "Every request was answered in time." if chart is None else "Requests by the time they were due."
    return html_page.section("Not answered in time", note, chart, drawn)


def _comparison(runs: Sequence[Run], drawn: Charts) -> str:
    table = html_page.table(COMPARED, comparison_rows(runs), numbers=range(1, len(COMPARED)))
    drawings = "".join(html_page.section(title, "", chart, drawn) for title, chart in charts.comparison_charts(runs))
    note = "The same arrivals and payloads, one run after the other, on the same cores."
    return f"<section><h2>Compared</h2><p class='note'>{note}</p>{table}</section>{drawings}"


def _plan(run: Run) -> str:
    """What was decided last, and why."""
    if not run.plans:
        return ""
    plan = run.plans[-1]
    stages = html_page.table(STAGE_COLUMNS, stage_rows(run.pipeline, plan), numbers=range(2, len(STAGE_COLUMNS)))
    said = "".join(f"<p class='note'>{escape(line)}</p>" for line in explanation_lines(plan))
    return f"<section><h2>Plan {plan.spec.generation}, the latest</h2>{stages}{said}</section>"


def _changes(run: Run) -> str:
    rows = []
    for at, plan in series.change_rows(run):
        running = "; ".join(f"{stage}: {line}" for stage, line in stage_summaries(plan).items())
        peak = f"{plan.spec.forecast.peak_rps:.1f}" if plan.spec.forecast else ""
        reason = plan.spec.explanation.change or plan.spec.reason
        if not plan.spec.feasible:
            reason = f"{reason} ({plan.spec.reason})"
        rows.append((f"{at:.0f} s", str(plan.spec.generation), peak, running, reason))
    if not rows:
        return "<section><h2>Plan changes</h2><p class='note'>None.</p></section>"
    table = html_page.table(("at", "plan", "planned for", "what runs", "why"), rows, numbers=range(3))
    return f"<section><h2>Plan changes</h2>{table}</section>"


def _faults(run: Run) -> str:
    if not run.faults:
        return ""
    rows = [(f"{fault.at - run.started_at:.1f} s", fault.what, fault.detail) for fault in run.faults]
    note = "Processes that ended unasked; each was started again. Dotted red lines mark them in the charts."
    table = html_page.table(("at", "what", "detail"), rows, numbers=range(1))
    return f"<section><h2>Faults</h2><p class='note'>{note}</p>{table}</section>"
