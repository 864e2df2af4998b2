"""OTAS's evaluation, simulated: one transformer at many numbers of tokens, by our policy and by the paper's baselines.

With `--served` each method also serves a real transformer under both loads, which takes some ten minutes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.grid import Cell, grid, run_cells
from benchmarks.harness.options import load_trace, paper_parser
from benchmarks.harness.report import Page, Report, print_table
from benchmarks.papers import otas_queries, otas_served
from benchmarks.papers.one_stage import STAGE, build_pipeline, build_plan, build_profile
from benchmarks.papers.otas_queries import (
    ASSUMED,
    BURSTY,
    GAMMAS,
    LOAD_SECONDS,
    MERGED,
    MODELS,
    OTAS,
    OURS,
    PETS,
    PLAIN,
    PROMPTED,
    QUERIES,
    SYNTHETIC,
    TABLE_RPS,
    WORKLOADS,
    Option,
    QueryEvaluation,
    QueryRow,
    Requests,
    bursty_rps,
    chart_by_load,
    chart_types,
    draw_requests,
    method_key,
    simulated_row,
    synthetic_rps,
)
from benchmarks.papers.policies import baselines, otas
from trimtab_adapter.simulation.environment import Environment
from trimtab_adapter.simulation.simulator import Scenario, simulate
from trimtab_router.request import RequestOptions
from trimtab_router.scheduling.policies import slack_fit, token_adaptive
from trimtab_router.scheduling.policies.interface import Point, Policy, SchedulerView

FACTORS = (0.75, 1.0, 1.25)
PETS_EVICTS, INFAAS, TOME, VPT = "PetS-like, evicting", "INFaaS-like", "ToMe −15", "VPT 2"
PAPER_GAINS = {PETS: 0.182, INFAAS: 0.725}
"""Utility of OTAS over these, as printed."""


@dataclass(frozen=True, slots=True)
class Method:
    """A policy and the options it may choose among."""

    policy: Policy
    options: Sequence[Option] = GAMMAS
    evicts: bool = True
    """Whether queries that cannot meet their deadline are dropped."""


def point_of_table(view: SchedulerView, points: Sequence[Point]) -> Point:
    """Return the point that the paper's table I gives for the arrival rate."""
    name = next((name for max_rps, name in TABLE_RPS if view.arrivals_rps() <= max_rps), "-20")
    return next(point for point in points if point.name == f"g{name}")


def _fixed(name: str) -> Method:
    return Method(baselines.fixed(f"g{name}"), [option for option in GAMMAS if option.name == name])


def _policy(policy: Policy, **changes: object) -> Policy:
    return Policy(partial(policy.decide, **changes), uses_fallbacks=True)


_PLAIN = [option for option in GAMMAS if option.name == PLAIN]
METHODS = {
    OURS: Method(token_adaptive.POLICY),
    OTAS: Method(_policy(otas.POLICY, table=point_of_table)),
    PETS: Method(baselines.PETS, _PLAIN, evicts=False),
    PETS_EVICTS: Method(baselines.PETS, _PLAIN),
    INFAAS: Method(baselines.INFAAS, MODELS),
    TOME: _fixed(MERGED),
    VPT: _fixed(PROMPTED),
    "SlackFit": Method(slack_fit.POLICY),
}
"""By the names on the page; ours first."""


def measure(rates: NDArray[np.float64], cell: Cell) -> QueryRow:
    """Simulate a cell; `rates` are those of the bursty load, one a second, and the synthetic load is as long."""
    requests = _requests(rates, cell)
    result = simulate(_scenario(METHODS[cell.method], requests, rates.size))
    return simulated_row(cell, result, np.array([QUERIES[kind].utility for kind in requests.types]), STAGE)


def _requests(bursty: NDArray[np.float64], cell: Cell) -> Requests:
    rates = synthetic_rps(bursty.size, cell.seed) if cell.case == (SYNTHETIC,) else bursty
    return draw_requests(rates, cell.factor, cell.seed)


def _scenario(method: Method, requests: Requests, seconds: int) -> Scenario:
    points = [option.point for option in method.options]
    pipeline = build_pipeline(
        "otas",
        points,
        schedulingPolicy="TokenAdaptive",
        dropPolicy="Predicted" if method.evicts else "Never",
        queue={"maxRows": 1_000_000},
    )
    plan = build_plan(pipeline, points)
    options = [RequestOptions(timeout_seconds=q.seconds, utility=q.utility, task=q.task) for q in QUERIES]
    return Scenario(
        pipeline=pipeline,
        profiles={STAGE: build_profile(pipeline.name, points)},
        arrivals_seconds=requests.at_seconds,
        duration_seconds=float(seconds),
        plan=plan,
        environment=Environment(spread=0.0, load_seconds=LOAD_SECONDS),
        policy=method.policy,
        options=tuple(options[kind] for kind in requests.types),
    )


def judge(evaluation: QueryEvaluation, trace: str) -> Report:
    """Compare ours with the paper's gains over its baselines, and with OTAS as printed in every setting."""
    report = Report("reproduce-otas", {"trace": trace, "cells": len(evaluation.all_rows)})
    report.add({"queries": sum(row.queries for row in evaluation.all_rows)})
    for workload in evaluation.workloads:
        for name in METHODS:
            key = method_key(name)
            report.add({f"{workload}_{key}_utility": evaluation.utility(workload, name)})
            report.add({f"{workload}_{key}_type_1": evaluation.type_share(workload, name, 0)})
            if name != OURS:
                report.add({f"{workload}_gain_over_{key}": evaluation.gain(workload, name)})
    over_pets, over_infaas = (100 * evaluation.gain(SYNTHETIC, rival) for rival in (PETS, INFAAS))
    report.hold("synthetic: utility over PetS-like, %", over_pets, ">=", 100 * PAPER_GAINS[PETS])
    report.hold("synthetic: utility over INFaaS-like, %", over_infaas, ">=", 100 * PAPER_GAINS[INFAAS])
    right = 100 * evaluation.type_share(SYNTHETIC, OURS, 0)
    report.hold("synthetic: right in time (type 1), %", right, ">=", 85.0)
    report.hold("least utility over OTAS as printed in any setting, %", _min_gain(evaluation, [OTAS]), ">=", 1e-9)
    report.hold(
        "least utility over fixed ToMe, VPT, PetS-like that evicts, in any setting, %",
        _min_gain(evaluation, [TOME, VPT, PETS_EVICTS]),
        ">=",
        1e-9,
    )
    return report


def _min_gain(evaluation: QueryEvaluation, rivals: Sequence[str]) -> float:
    return min(
        100 * evaluation.gain(workload, rival, factor)
        for workload in evaluation.workloads
        for factor in evaluation.factors((workload,))
        for rival in rivals
    )


COLUMNS = ("load", "method", "utility", "ours beside it", "type 1", "type 2", "type 3", "type 4", "paper")
SHOWN = (OURS, OTAS, PETS, PETS_EVICTS, INFAAS, TOME, VPT)
PRINTED = {
    (SYNTHETIC, OTAS): "type 1 85.54 %, no query late or evicted",
    (SYNTHETIC, PETS): "OTAS 18.2 % above",
    (SYNTHETIC, INFAAS): "OTAS 72.5 % above",
    (BURSTY, OTAS): "type 1 75.58 % (MAF)",
    (BURSTY, VPT): "type 1 64.14 % (MAF)",
    (BURSTY, TOME): "type 2 16.85 % (MAF)",
}
ASSUMED_NOTE = (
    f"Printed by the paper and used as it is: throughputs at 0 and −15, both tables, the load. Assumed: {ASSUMED}. "
    "PetS knows no deadlines and drops nothing; beside it a variant that drops. Escalations are not in the paper: the "
    "least confident share p is assumed to hold 1 − (1 − p)² of a gain. No threshold uses these."
)


def table_rows(evaluation: QueryEvaluation) -> list[tuple[str, ...]]:
    """Return a row of COLUMNS for each load and method, at the paper's load."""
    return [
        (
            workload,
            name,
            f"{evaluation.utility(workload, name):.0f}",
            f"{100 * evaluation.gain(workload, name):+.1f} %" if name != OURS else "",
            *(f"{100 * evaluation.type_share(workload, name, index):.2f} %" for index in range(4)),
            PRINTED.get((workload, name), ""),
        )
        for workload in evaluation.workloads
        for name in METHODS
    ]


def build_page(
    evaluation: QueryEvaluation, report: Report, trace: str, served: "otas_served.Comparison | None" = None
) -> Page:
    how = "simulated and served" if served else "simulated"
    page = Page("OTAS's evaluation", how, f"{len(evaluation.all_rows)} simulations · bursty load: {trace}")
    page.add_thresholds(report)
    page.add_chart(
        "What became of the queries",
        "The paper's figure 13, at the paper's load: right in time (1), wrong in time (2), late (3), evicted (4). "
        "The paper prints for OTAS 85.54 % right on its synthetic load, 75.58 % on its trace.",
        chart_types(evaluation, SHOWN),
    )
    page.add_chart(
        "Utility by load",
        "The paper's figures 9 and 10: utility in % of OTAS as printed; 1 is the paper's load.",
        chart_by_load(evaluation, SHOWN),
    )
    page.add_table("All figures", "", COLUMNS, table_rows(evaluation), range(2, 8))
    if served:
        otas_served.add_sections(page, served)
    page.add_notes("What is the paper's, and what is assumed", ASSUMED_NOTE)
    return page


def main() -> int:
    """Simulate every cell, serve if asked, write the page; 0 if every threshold holds."""
    parser = paper_parser("otas", __doc__, "another trace of requests per second, for the bursty load")
    parser.add_argument("--trace-start", type=int, help="second of the trace at which to begin (another trace: 0)")
    parser.add_argument("--seconds", type=int, default=60, help="of each load")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--served", action="store_true", help="also serve a real transformer by each method")
    parser.add_argument("--served-seconds", type=int, default=30, help="of each load that is served")
    parser.add_argument(
        "--deadline", type=float, default=1.2, help="seconds, of served queries with the short deadline"
    )
    options = parser.parse_args()
    trace = load_trace(options, otas_queries.TRACE, otas_queries.START_SECONDS, "bursts are made up")
    rates = bursty_rps(trace.file, trace.start_seconds, options.seconds)
    cells = grid([(workload,) for workload in WORKLOADS], METHODS, factors=FACTORS, seeds=options.seeds)
    evaluation = QueryEvaluation(run_cells(partial(measure, rates), cells, options.processes))
    report, served = judge(evaluation, trace.label), None
    if options.served:
        served_rates = bursty_rps(trace.file, trace.start_seconds, options.served_seconds)
        served = otas_served.serve_all(served_rates, options.deadline, options.out)
        otas_served.judge(served, report)
    print_table(COLUMNS, table_rows(evaluation))
    build_page(evaluation, report, trace.label, served).write(options.out / "otas.html")
    return report.finish()
