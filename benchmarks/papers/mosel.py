"""MOSEL's evaluation, simulated: five multimodal models under a Twitter load, by our policy and by the paper's.

With `--served` five policies also serve digits-av, beside simulations of the same jobs.

The paper prints few figures of its models (its figure 1 is a plot). What it prints is used as it is: TVLT's three
accuracies and the 11 times that its audio is faster, the most queries a second that each model was offered (twice what
it carries, section 7.1), and the gain in throughput of each. The rest is chosen so that the cheapest subset is as much
faster as that gain, and ordered as the paper says (appendix E); `assumed` names it.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import benchmarks.papers.policies  # noqa: F401 - registers the baselines
from benchmarks.harness.grid import Cell, Evaluation, grid, run_cells
from benchmarks.harness.options import load_trace, paper_parser
from benchmarks.harness.report import Page, Report, print_table
from benchmarks.papers import mosel_jobs, mosel_served
from benchmarks.papers.mosel_jobs import (
    BY_LOAD,
    MAX_QUEUED_ROWS,
    METHODS,
    MOSEL,
    NO_ESCALATION,
    OURS,
    PLAIN,
    ROUNDING,
    JobRow,
    Jobs,
    carried_rps,
    chart_by_load,
    completion_seconds,
    draw_jobs,
    load_shape,
    met,
    simulated_row,
    violations,
)
from benchmarks.papers.one_stage import (
    FULL_BATCH,
    STAGE,
    VARIANT,
    SimulatedPoint,
    build_pipeline,
    build_plan,
    build_profile,
)
from trimtab_adapter.simulation.environment import Environment
from trimtab_adapter.simulation.simulator import Scenario, simulate
from trimtab_router.request import RequestOptions
from trimtab_router.scheduling.policies import POLICIES

FIXED_SHARE = 0.1
"""Of the seconds of a full batch, what a batch takes however small."""
FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
MISJUDGED, MISJUDGED_FACTOR = {f"{OURS}, batches × {times:g}": times for times in (0.5, 1.5)}, 0.5
"""Methods whose batches take so many times what the plan expects, and the load at which they are tried."""
POLICY_OF_METHOD: Mapping[str, str] = dict.fromkeys((NO_ESCALATION, *MISJUDGED), OURS)
KEYS: Mapping[str, str] = {
    OURS: "ours",
    NO_ESCALATION: "ours_without_escalation",
    MOSEL: "mosel",
    PLAIN: "allmodalities",
}
"""Names of methods in figures."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the paper."""

    name: str
    accuracy: Mapping[str, float]
    """Of each subset of its modalities, by their letters."""
    latency: Mapping[str, float]
    """Of each subset, in parts of that of all modalities."""
    max_rps: float
    """Queries a second it was offered at most; all modalities carry half of it."""
    gain: float
    """The paper's gain in throughput."""
    assumed: str
    """Which of these figures the paper does not print."""

    def points(self, misjudged: float = 1.0) -> list[SimulatedPoint]:
        """Return a point for each subset; batches of all are expected to be `misjudged` times as fast as they are."""
        return [
            SimulatedPoint(
                subset.lower(), accuracy, partial(self._batch_seconds, self.latency[subset] / misjudged), tuple(subset)
            )
            for subset, accuracy in self.accuracy.items()
        ]

    def _batch_seconds(self, latency: float, rows: float) -> float:
        full_seconds = latency * FULL_BATCH / (0.5 * self.max_rps)
        return FIXED_SHARE * full_seconds + (1 - FIXED_SHARE) * full_seconds / FULL_BATCH * rows


MODELS = (
    Model(
        "TVLT", {"A": 0.67, "V": 0.70, "AV": 0.80}, {"A": 1 / 11, "V": 0.90, "AV": 1.0}, 60, 5.3, "the latency of video"
    ),
    Model(
        "AVHuBERT",
        {"V": 0.62, "A": 0.90, "AV": 0.94},
        {"V": 0.95, "A": 0.45, "AV": 1.0},
        20,
        2.2,
        "accuracies and latencies; audio is faster by the gain",
    ),
    Model(
        "TBN",
        {"I": 0.40, "A": 0.46, "V": 0.55, "IA": 0.52, "IV": 0.60, "AV": 0.62, "IAV": 0.66},
        {"I": 0.34, "A": 0.36, "V": 0.32, "IA": 0.69, "IV": 0.65, "AV": 0.67, "IAV": 1.0},
        40,
        3.1,
        "accuracies and latencies, in the paper's order; video is faster by the gain",
    ),
    Model(
        "MMSA",
        {"T": 0.838, "A": 0.60, "V": 0.60, "TA": 0.845, "TV": 0.845, "AV": 0.63, "TAV": 0.852},
        {"T": 0.89, "A": 0.80, "V": 0.80, "TA": 0.95, "TV": 0.95, "AV": 0.85, "TAV": 1.0},
        100,
        1.12,
        "all but the best accuracy; text is faster by the gain, the others hardly more",
    ),
    Model(
        "ViLT",
        {"I": 0.42, "T": 0.58, "TI": 0.64},
        {"I": 0.88, "T": 1 / 4.3, "TI": 1.0},
        40,
        4.3,
        "accuracies and latencies; text is faster by the gain",
    ),
)
MODEL_BY_NAME = {model.name: model for model in MODELS}


def cells(seeds: int) -> list[Cell]:
    """Return the grid, and our policy with wrong latencies at one load."""
    cases = [(model.name,) for model in MODELS]
    misjudged = grid(cases, MISJUDGED, factors=[MISJUDGED_FACTOR], seeds=seeds)
    return grid(cases, METHODS, factors=FACTORS, seeds=seeds) + misjudged


def measure(shape: NDArray[np.float64], cell: Cell) -> JobRow:
    """Simulate a cell under a load of this shape, [S]: 0 … 1, one value a second."""
    model = MODEL_BY_NAME[cell.case[0]]
    jobs = draw_jobs(shape, model.max_rps, model.accuracy.values(), cell.seed)
    return simulated_row(cell, simulate(_scenario(model, cell, jobs)), jobs, STAGE)


def _scenario(model: Model, cell: Cell, jobs: Jobs) -> Scenario:
    """The load is made denser by playing it faster, so that the jobs stay the same; so do the true latencies."""
    misjudged = MISJUDGED.get(cell.method, 1.0)
    points = model.points(misjudged)
    policy = POLICY_OF_METHOD.get(cell.method, cell.method)
    pipeline = build_pipeline(model.name.lower(), points, schedulingPolicy=policy, queue={"maxRows": MAX_QUEUED_ROWS})
    plan = build_plan(
        pipeline,
        points,
        escalates=lambda point, to: (
            cell.method != NO_ESCALATION
            and policy == OURS
            and set(to.inputs) > set(point.inputs)
            and to.accuracy > point.accuracy
        ),
        priced_rows_rps=float(jobs.rows.sum()) / jobs.seconds * cell.factor,
    )
    return Scenario(
        pipeline=pipeline,
        profiles={STAGE: build_profile(pipeline.name, points)},
        arrivals_seconds=jobs.arrivals_seconds / cell.factor,
        duration_seconds=jobs.seconds / cell.factor,
        plan=plan,
        environment=Environment(spread=0.0, service_ratios={(STAGE, VARIANT): misjudged}),
        policy=POLICIES[policy],
        rows=tuple(jobs.rows.tolist()),
        options=tuple(RequestOptions(accuracy_floor=floor) for floor in jobs.floors.tolist()),
    )


def judge(evaluation: Evaluation[JobRow], trace: str) -> Report:
    """Compare our policy without escalations with MOSEL's."""
    report = Report("reproduce-mosel", {"trace": trace, "cells": len(evaluation.all_rows)})
    worse, better, added = 0, 0, 0.0
    for model in MODELS:
        case, name = (model.name,), model.name.lower()
        lost = {method: evaluation.mean(case, method, violations) for method in KEYS}
        kept = {method: evaluation.mean(case, method, met) for method in KEYS}
        for method, key in KEYS.items():
            report.add({f"{name}_violations_{key}": lost[method], f"{name}_met_{key}": kept[method]})
        more_lost = lost[NO_ESCALATION] - lost[MOSEL]
        more_kept = kept[NO_ESCALATION] - kept[MOSEL]
        worse += more_lost > ROUNDING or more_kept < -ROUNDING
        better += more_lost < -ROUNDING and more_kept > ROUNDING
        for method in (OURS, NO_ESCALATION, MOSEL, PLAIN):
            report.add({f"{name}_carried_rps_{KEYS[method]}": carried_rps(evaluation, model.name, method)})
        right = evaluation.mean(case, OURS, violations, MISJUDGED_FACTOR)
        for method, times in MISJUDGED.items():
            wrong = evaluation.mean(case, method, violations, MISJUDGED_FACTOR)
            report.add({f"{name}_violations_at_{times:g}_times_the_latency": wrong})
            added = max(added, wrong - right)
    report.hold("models on which MOSEL's policy is better in violations or in jobs that met both SLOs", worse, "==", 0)
    report.hold("models on which ours is better in both", better, ">=", 3)
    report.hold("most violations added by latencies 50 % off, points", 100 * added, "<=", 2.0)
    return report


COLUMNS = (
    "model",
    "policy",
    "violations",
    "both SLOs met",
    "accuracy",
    "escalation pending",
    "escalated",
    "completion",
    "queries/s at ≤ 1 %",
    "over all modalities",
    "paper's gain",
)
TABLE_NOTE = (
    "Means over all loads. Both SLOs met: answered in time and, by expectation, as accurate as the job asked. "
    "Escalated: rows that ran a second time, of all first runs. Completion: mean seconds of the answered jobs."
)
ASSUMED_NOTE = (
    "The paper prints few figures of its models. Printed and used as they are: TVLT's accuracies and the 11 times its "
    "audio is faster, the most queries offered to each model, the gains. Assumed: "
)
ESCALATION_NOTE = (
    "Escalations are not in the paper: ours with them assumes that the least confident share p of the rows holds "
    "1 − (1 − p)² of what a wider subset gains. Nothing of that is compared with MOSEL."
)


def table_rows(evaluation: Evaluation[JobRow]) -> list[tuple[str, ...]]:
    """Return a row of COLUMNS for each model and policy."""
    return [_table_row(evaluation, model, method) for model in MODELS for method in METHODS]


def _table_row(evaluation: Evaluation[JobRow], model: Model, method: str) -> tuple[str, ...]:
    mean = partial(evaluation.mean, (model.name,), method)
    carried, plain = (carried_rps(evaluation, model.name, name) for name in (method, PLAIN))
    return (
        model.name,
        method,
        f"{100 * mean(violations):.1f} %",
        f"{100 * mean(met):.1f} %",
        f"{mean(lambda row: row.accuracy):.3f}",
        f"{100 * mean(lambda row: row.pending):.1f} %",
        f"{100 * mean(lambda row: row.escalated):.1f} %",
        f"{mean(completion_seconds):.2f} s",
        f"{carried:.1f}",
        f"{carried / plain:.2f}" if plain > 0 else "–",
        f"{model.gain:g}" if method == MOSEL else "",
    )


def build_page(
    evaluation: Evaluation[JobRow], report: Report, trace: str, served: "mosel_served.Comparison | None" = None
) -> Page:
    how = "simulated and served" if served else "simulated"
    page = Page("MOSEL's evaluation", how, f"{len(evaluation.all_rows)} simulations · load: {trace}")
    page.add_thresholds(report)
    models = {model.name: model.name for model in MODELS}
    for name, note, figure, y in BY_LOAD:
        page.add_chart(name, note, chart_by_load(evaluation, models, METHODS, figure, y))
    page.add_table("All figures", TABLE_NOTE, COLUMNS, table_rows(evaluation), range(2, 11))
    if served:
        mosel_served.add_sections(page, served)
    assumed = "; ".join(f"{model.name}: {model.assumed}" for model in MODELS)
    page.add_notes("What is the paper's, and what is assumed", f"{ASSUMED_NOTE}{assumed}.", ESCALATION_NOTE)
    return page


def main() -> int:
    """Simulate every cell, serve if asked, write the page; 0 if every threshold holds."""
    options = _parse()
    trace = load_trace(options, mosel_jobs.TRACE, mosel_jobs.START_SECONDS, "a load of the same shape is made up")
    shape = load_shape(trace.file, trace.start_seconds, options.seconds)
    if options.served:  # before minutes of simulating: a trace or recordings that cannot be served
        served_shape = load_shape(trace.file, trace.start_seconds, options.served_seconds)
        recordings = mosel_served.draw_recordings(options.recordings)
    evaluation = Evaluation(run_cells(partial(measure, shape), cells(options.seeds), options.processes))
    report, served = judge(evaluation, trace.label), None
    if options.served:
        served = mosel_served.serve_all(served_shape, trace.label, recordings, options)
        mosel_served.judge(served, report)
    print_table(COLUMNS, table_rows(evaluation))
    build_page(evaluation, report, trace.label, served).write(options.out / "mosel.html")
    return report.finish()


def _parse() -> argparse.Namespace:
    parser = paper_parser("mosel", __doc__, "another trace of requests per second")
    parser.add_argument("--trace-start", type=int, help="second of the trace at which to begin (another trace: 0)")
    parser.add_argument("--seconds", type=int, default=60, help="of the load")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--served", action="store_true", help="also serve digits-av by five policies")
    parser.add_argument("--recordings", type=Path, help="folder of real recordings to serve; else synthesised voices")
    parser.add_argument("--loads", type=parse_loads, default=(0.25, 0.5, 1.0, 2.0), help="to serve, as 0.25,0.5,1,2")
    parser.add_argument("--served-seconds", type=int, default=30, help="of each load that is served")
    parser.add_argument("--cores", type=float, default=0.25, help="that each replica is limited to")
    return parser.parse_args()


def parse_loads(text: str) -> tuple[float, ...]:
    """Parse multiples of the paper's load, ascending. Raises ArgumentTypeError if one is no number above 0."""
    try:
        loads = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        loads = ()
    if not loads or not all(0 < load < inf for load in loads):
        raise argparse.ArgumentTypeError(f"{text!r} are no loads: write numbers above 0, as 0.25,0.5,1,2")
    return loads
