"""IPA's evaluation, simulated: five pipelines, four workloads, every planner, several seeds.

A request that is late or dropped counts as accuracy 0, so a planner cannot reach the front by violations.
"""

import argparse
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go

from benchmarks.harness import charts
from benchmarks.harness.grid import Cell, Evaluation, interval, run_cells
from benchmarks.harness.options import find_trace, paper_parser
from benchmarks.harness.report import Page, Report, print_table
from benchmarks.papers import ipa_data, ipa_measured
from benchmarks.papers.ipa_cells import (
    BASELINES,
    LATENCY_QUANTILES,
    METHODS,
    ORACLE,
    OURS,
    PIPELINES,
    REACTIVE,
    PlannerRow,
    Source,
    cells,
    measure,
    read_pipeline,
    read_workloads,
)
from benchmarks.papers.ipa_data import RecordedRun
from trimtab.options import console
from trimtab_pipelines.documents import load_pipeline
from trimtab_profiler.profile import write_profiles

SEEDS, QUICK_SECONDS, QUICK_WORKLOADS = 3, 240, ("bursty", "steady_low")
PAPER_NAMES = {OURS: "IPA", "FA2-low": "FA2-low", "FA2-high": "FA2-high", "RIM": "RIM"}
"""Our methods' names in the paper's recorded runs."""
MAX_ORACLE_VIOLATIONS, MAX_LSTM_VIOLATIONS = 0.005, 0.01
MIN_ABOVE, MAX_MIXED_VIOLATIONS = 0.7, 0.002
"""With mixes: least share of pairs above the front, and most violations."""
SAME_CORES, SAME_ACCURACY = 0.005, 0.0005
"""What counts as equal if the seeds' own interval is narrower: half a percent of the cores, 0.05 points."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a method of ours stands in one pipeline under one workload."""

    standing: Literal["above", "on", "below"]
    margin: float
    """Its served accuracy over the best of the baselines with no more cores, or the same; NaN without one."""
    beaten_by: str = ""
    """The baseline that dominates it."""

    @property
    def label(self) -> str:
        return f"{self.standing} {self.beaten_by}".strip()


def place(evaluation: Evaluation[PlannerRow], case: tuple[str, ...], method: str = OURS) -> Place:
    """Compare a method with every baseline, seed by seed on the same arrivals."""
    ours = evaluation.rows(case, method)
    rivals = {name: rows for name in BASELINES if (rows := evaluation.rows(case, name))}
    beaten_by = next((name for name, theirs in rivals.items() if _dominates(theirs, ours)), "")
    cores, accuracy = _mean_point(ours)
    points = [_mean_point(theirs) for theirs in rivals.values()]
    margin = accuracy - max((a for c, a in points if c <= (1.0 + SAME_CORES) * cores), default=math.nan)
    above = math.isnan(margin) or margin > SAME_ACCURACY
    standing: Literal["above", "on", "below"] = "below" if beaten_by else "above" if above else "on"
    return Place(standing, margin, beaten_by)


def _dominates(theirs: Sequence[PlannerRow], ours: Sequence[PlannerRow]) -> bool:
    """Whether a rival has no more cores and no less accuracy on average, and clearly the better of one of these."""
    pairs = list(zip(theirs, ours, strict=True))
    cores = interval(a.cores - b.cores for a, b in pairs)
    accuracy = interval(a.served_accuracy - b.served_accuracy for a, b in pairs)
    if cores.mean > 0 or accuracy.mean < 0:
        return False
    same_cores = SAME_CORES * float(np.mean([row.cores for row in ours]))
    cheaper = cores.mean < -max(np.nan_to_num(cores.half), same_cores)
    better = accuracy.mean > max(np.nan_to_num(accuracy.half), SAME_ACCURACY)
    return bool(cheaper or better)


def _mean_point(rows: Sequence[PlannerRow]) -> tuple[float, float]:
    return float(np.mean([row.cores for row in rows])), float(np.mean([row.served_accuracy for row in rows]))


def judge(evaluation: Evaluation[PlannerRow], seconds: float, *, mixes: bool = False) -> Report:
    """Hold two thresholds: nowhere below the front, and few violations wherever they can be avoided.

    With mixes, most pairs are above the front.

    Without cells to compare, or if an oracle or a plan met no requests, they do not hold.
    """
    cases = evaluation.cases
    report = Report("reproduce-ipa", {"cells": len(evaluation.all_rows), "wall_seconds": seconds})
    places = {case: place(evaluation, case) for case in cases}
    avoidable: list[float] = []
    for case, ours_place in places.items():
        name = "_".join(case).replace("-", "_")
        ours, oracle = (evaluation.mean(case, method, _violations) for method in (OURS, ORACLE))
        if not oracle > MAX_ORACLE_VIOLATIONS:
            avoidable.append(ours)
        report.add(
            {f"{name}_standing": ours_place.label, f"{name}_margin": ours_place.margin, f"{name}_violations": ours}
        )
    reactive = [evaluation.mean(case, REACTIVE, _violations) for case in cases]
    report.add({"worst_violations_reactive": max(reactive, default=0.0)})
    below = sum(each.standing == "below" for each in places.values())
    above = sum(each.standing == "above" for each in places.values())
    worst = float(np.max(avoidable)) if avoidable else math.inf  # NaN if one is
    report.hold("pipeline x workload pairs judged", len(cases), ">=", 1)
    report.hold("pairs where an oracle avoids violations", len(avoidable), ">=", 1)
    report.hold("pipeline x workload pairs below the baselines' front", below, "==", 0)
    report.add({"pairs_above_the_front": above})
    if mixes:
        report.hold("share of pairs above the front", above / max(1, len(cases)), ">=", MIN_ABOVE)
    most = MAX_MIXED_VIOLATIONS if mixes else MAX_LSTM_VIOLATIONS
    report.hold("worst violations with the LSTM where the oracle has at most 0.5 %", worst, "<=", most)
    return report


def _violations(row: PlannerRow) -> float:
    return row.violations


COLUMNS = (
    *("pipeline", "workload", "method", "PAS", "served PAS", "cores", "late"),
    *("dropped", "objective", "p99", "standing", "paper: PAS", "paper: cores"),
)
FRONT_NOTE = (
    "Mean cores against mean PAS, over all seeds; crosses are the paper's recorded runs, on its own machines and with "
    "its batch sizes. A request late or dropped counts 0 in the served PAS shown here."
)
LATENCY_NOTE = "Quantiles of the responses' latency, averaged over loads and seeds; the paper's figure 15."
TABLE_NOTE = (
    "± is the half width of the 95 % interval over seeds. Served PAS: a request late or dropped counts 0. "
    "Standing: ours against the front of the baselines, by served PAS and cores."
)
COLOURS = {
    OURS: "#3f7fd9",
    REACTIVE: "#9b7fd9",
    ORACLE: "#2b4f8a",
    **dict(zip(BASELINES, ("#e08a2e", "#b0691c", "#cf4b4b", "#a33333", "#5a9a6a", "#3a7a4a", "#868d98"), strict=True)),
}
SYMBOLS = {OURS: "circle", REACTIVE: "triangle-up", ORACLE: "triangle-down"}
RecordedRuns = Mapping[tuple[str, ...], RecordedRun]


def table_rows(evaluation: Evaluation[PlannerRow], recorded: RecordedRuns) -> list[tuple[str, ...]]:
    """Return a row of COLUMNS for each pipeline, workload and method."""
    return [
        _table_row(evaluation, case, method, recorded.get((*case, PAPER_NAMES.get(method, ""))))
        for case in evaluation.cases
        for method in METHODS
    ]


def _table_row(
    evaluation: Evaluation[PlannerRow], case: tuple[str, ...], method: str, paper: RecordedRun | None
) -> tuple[str, ...]:
    rows = evaluation.rows(case, method)
    pipeline, workload = case
    return (
        pipeline,
        workload.replace("_", " "),
        method,
        interval(100 * row.accuracy for row in rows).format(1),
        interval(100 * row.served_accuracy for row in rows).format(1),
        interval(row.cores for row in rows).format(1),
        interval(100 * row.late for row in rows).format(2, " %"),
        interval(100 * row.dropped for row in rows).format(2, " %"),
        interval(row.objective for row in rows).format(2),
        f"{np.mean([row.p99_seconds for row in rows]):.2f} s",
        place(evaluation, case, method).label if method == OURS else "",
        f"{100 * paper.accuracy:.1f}" if paper else "",
        f"{paper.cores:.1f}" if paper else "",
    )


def build_page(
    evaluation: Evaluation[PlannerRow], recorded: RecordedRuns, report: Report, source: Source, lead: str
) -> Page:
    cases = evaluation.cases
    pipelines = list(dict.fromkeys(pipeline for pipeline, _ in cases))
    page = Page("IPA's evaluation", "simulated", lead)
    page.add_thresholds(report)
    for name in pipelines:
        front = _front(evaluation, recorded, [case for case in cases if case[0] == name])
        page.add_chart(f"{name}: accuracy against cores", FRONT_NOTE, front)
    slos = {name: read_pipeline(source, name)[0].spec.slo.latency_seconds for name in pipelines}
    page.add_chart("Latency distributions", LATENCY_NOTE, _latencies(evaluation, slos))
    page.add_table("All figures", TABLE_NOTE, COLUMNS, table_rows(evaluation, recorded), range(3, 10))
    return page


def _front(evaluation: Evaluation[PlannerRow], recorded: RecordedRuns, cases: Sequence[tuple[str, ...]]) -> go.Figure:
    """Return mean cores against mean served PAS, one panel a workload."""
    columns = []
    for case in cases:
        dots = []
        for method in METHODS:
            rows = evaluation.rows(case, method)
            cores, accuracy = _mean_point(rows)
            marker = {"size": 11 if method == OURS else 9, "symbol": SYMBOLS.get(method, "square")}
            dots.append(_dots(method, [cores], [100 * accuracy], color=COLOURS[method], **marker))
            paper = recorded.get((*case, PAPER_NAMES.get(method, "")))
            if paper is not None:
                name = f"{PAPER_NAMES[method]}, paper"
                outline = {"width": 2, "color": COLOURS[method]}
                cross = {"size": 9, "symbol": "x-thin", "line": outline, "color": COLOURS[method]}
                dots.append(_dots(name, [paper.cores], [100 * paper.accuracy], **cross))
        columns.append((case[1].replace("_", " "), dots))
    return charts.panels(columns, x="cores", y="PAS × 100", from_zero=False).update_xaxes(type="log")


def _latencies(evaluation: Evaluation[PlannerRow], slos: Mapping[str, float]) -> go.Figure:
    """Return the share of requests answered within a share of the SLO, one panel a pipeline, all loads together."""
    columns = []
    for name, slo_seconds in slos.items():
        lines = []
        for method in METHODS:
            rows = [row for case in evaluation.cases if case[0] == name for row in evaluation.rows(case, method)]
            seconds = np.nanmean([row.latency_seconds for row in rows], axis=0) / slo_seconds
            lines.append(charts.line(method, seconds, LATENCY_QUANTILES, COLOURS[method], bold=method == OURS))
        columns.append((f"{name}, SLO {slo_seconds:.1f} s", lines))
    return charts.panels(columns, x="latency / SLO", y="share of requests")


def _dots(name: str, x: Iterable[float], y: Iterable[float], **marker: Any) -> go.Scatter:
    return go.Scatter(x=list(x), y=list(y), name=name, mode="markers", marker=marker)


def main() -> int:
    """Simulate every cell, write table and page; 0 if every threshold holds or the data is missing."""
    options = _parse()
    trace = find_trace(options.trace, options.data / ipa_data.TRACE, "nothing can be simulated")
    inputs = (*(() if trace else (ipa_data.TRACE,)), ipa_data.PROFILES, ipa_data.STAGES, ipa_data.TIMELINES)
    missing = [file for name in inputs if not (file := options.data / name).exists()]
    if trace is None or missing:
        hint = "give --data FOLDER (DATA=FOLDER with make) and perhaps --trace FILE"
        return Report("reproduce-ipa", {"skipped": f"{missing[0]} is missing; {hint}"}).finish()
    source = Source(
        folder=options.data,
        manifests=options.pipelines,
        trace=trace,
        offset_seconds=options.trace_start,
        published=options.published_excerpts,
        seconds=QUICK_SECONDS if options.quick else None,
        mixes=options.mixes,
        measured=None if options.profiles == "reconstructed" else options.measure or ipa_measured.SHIPPED,
    )
    names = options.only or list(PIPELINES)
    if options.measure is not None:
        pipelines = [load_pipeline(source.manifests / name) for name in names]
        ipa_measured.measure(pipelines, options.measure, options.out / "checkpoints")
    if options.profiles_only:
        for name in names:
            console.print(f"written: {write_profiles(read_pipeline(source, name)[1], options.out / name)}")
        return 0
    workloads = tuple(read_workloads(source))  # before hours of simulating: a trace that lacks an excerpt
    return _evaluate(options, source, cells(names, QUICK_WORKLOADS if options.quick else workloads, options.seeds))


def _evaluate(options: argparse.Namespace, source: Source, wanted: Sequence[Cell]) -> int:
    began = time.perf_counter()
    evaluation = Evaluation(run_cells(partial(measure, source), wanted, options.processes))
    recorded = ipa_data.read_recorded_runs(options.data)
    excerpts = "the paper's own" if source.published else "look-alikes from the training part"
    lead = f"{len(evaluation.all_rows)} simulations, {options.seeds} seeds each · excerpts: {excerpts}"
    lead += f" · profiles: {options.profiles}"
    rows = table_rows(evaluation, recorded)
    print_table(COLUMNS, rows)
    report = judge(evaluation, time.perf_counter() - began, mixes=source.mixes)
    build_page(evaluation, recorded, report, source, lead).write(options.out / "ipa.html")
    return report.finish()


def _parse() -> argparse.Namespace:
    parser = paper_parser("ipa", __doc__, "another trace of requests per second")
    parser.add_argument("--pipelines", type=Path, default=Path("pipelines"), help="folder of the manifests")
    parser.add_argument("--trace-start", type=int, default=0, help="second of the recording at which the trace begins")
    parser.add_argument("--published-excerpts", action="store_true", help="the paper's own seconds of the recording")
    parser.add_argument("--only", action="append", choices=PIPELINES, help="this pipeline; repeatable")
    parser.add_argument("--profiles-only", action="store_true", help="only write OUT/PIPELINE/profile.yaml")
    profiles = ("reconstructed", "measured")
    parser.add_argument("--profiles", choices=profiles, default=profiles[0], help="the paper's, or of full-size models")
    parser.add_argument("--measure", type=Path, metavar="CSV", help="measure the profiles that this file lacks")
    parser.add_argument("--mixes", action="store_true", help="let our planner mix variants of a stage")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--quick", action="store_true", help="two workloads, four minutes each")
    return parser.parse_args()
