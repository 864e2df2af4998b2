"""`trimtab plan`: what would run at a given load, and what if it were another; starts nothing."""

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from trimtab.options import (
    InClusterOption,
    JsonOption,
    NamespaceOption,
    PipelineArgument,
    ProfilesOption,
    WhatIfOption,
    aside,
    console,
    write_json_line,
)
from trimtab.plan_inputs import PlanInputs, plan_inputs
from trimtab.plan_view import (
    ALTERNATIVE_COLUMNS,
    PlanView,
    alternative_rows,
    plan_view_json,
    stage_tables,
    terminal_table,
)
from trimtab.plan_view import explanation_lines as words_of
from trimtab_adapter.planning.baselines import static_plan
from trimtab_adapter.planning.decide import PlanningInputs, build_plan, planning_problem
from trimtab_adapter.planning.relaxation import solve_or_relax
from trimtab_adapter.planning.what_if import WhatIfError, parse_what_if, solve_alternatives
from trimtab_loadtester.load_spec import LoadSpec
from trimtab_pipelines.documents import write_json
from trimtab_pipelines.plan import ForecastRecord, PipelinePlan


def command(
    pipeline: PipelineArgument,
    load: Annotated[
        str, typer.Option("--load", help="Requests per second to plan for; of a load that varies, its peak")
    ],
    profiles: ProfilesOption = None,
    baseline: Annotated[
        Literal["lightest", "heaviest"] | None, typer.Option(help="Plan these variants and never change them")
    ] = None,
    what_if: WhatIfOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan as JSON, for `up --plan`")] = None,
    *,
    in_cluster: InClusterOption = False,
    namespace: NamespaceOption = None,
    as_json: JsonOption = False,
) -> int:
    """Show what would run at a load, and why, without running it."""
    if what_if and baseline:
        raise WhatIfError("--what-if asks what would be best; a --baseline never changes. Give one of them")
    load_rps = peak_rps(load)
    check_what_if(what_if)
    with aside(as_json):
        made_from = plan_inputs(pipeline, profiles, in_cluster=in_cluster, namespace=namespace)
        decision = None if baseline else decision_at(made_from, load_rps, what_if or [])
        plan = decision.plan if decision else _static(made_from, baseline or "lightest", load_rps)
        if not as_json:
            _show(made_from, plan, decision)
        if out is not None:
            write_json(out, plan)
            console.print(f"written to {out}")
    if as_json:
        alone = {"plan": plan.model_dump(mode="json", by_alias=True, exclude_none=True)}
        write_json_line(plan_view_json(decision) if decision else alone)
    return 0 if plan.spec.feasible else 1


def peak_rps(load: str) -> float:
    """Read a load to plan for: its peak. Raises LoadError saying what would be right."""
    spec = LoadSpec.parse(load)
    return float(spec.pattern_rps.max())


def check_what_if(what_if: list[str] | None) -> None:
    """Raise WhatIfError where one cannot be read, before anything is measured for it."""
    for asked in what_if or ():
        parse_what_if(asked)


def _show(made_from: PlanInputs, plan: PipelinePlan, decision: PlanView | None) -> None:
    for table in stage_tables(made_from.pipeline, plan):
        console.print(table)
    for line in words_of(plan):
        console.print(line)
    if decision and decision.alternatives:
        console.print()
        console.print(terminal_table(ALTERNATIVE_COLUMNS, alternative_rows(decision), "what if"))


def _static(made_from: PlanInputs, baseline: Literal["lightest", "heaviest"], load_rps: float) -> PipelinePlan:
    return static_plan(made_from.pipeline, made_from.profiles, baseline, load_rps, time.time())


def decision_at(made_from: PlanInputs, load_rps: float, what_if: list[str]) -> PlanView:
    """Decide for a load, and for every alternative asked for; what runs now gives changes their price."""
    now, document = time.time(), made_from.pipeline
    forecast = ForecastRecord(peak_rps=load_rps, source="given", reason="--load")
    question, forecast = planning_problem(document, made_from.profiles, PlanningInputs(forecast, now, made_from.plan))
    tried = [alternative for asked in what_if for alternative in solve_alternatives(question, asked)]
    found = solve_or_relax(question)
    return PlanView(build_plan(document, question, found, forecast, now), question, found, tried)
