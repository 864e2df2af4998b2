"""`trimtab explain`: why a plan is what it is, what binds, and what the next step in any direction would cost."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from trimtab.commands.plan import check_what_if, decision_at, peak_rps
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
from trimtab.plan_inputs import plan_inputs
from trimtab.plan_view import (
    ALTERNATIVE_COLUMNS,
    PRICE_COLUMNS,
    PlanView,
    alternative_rows,
    explanation_lines,
    plan_view_json,
    price_rows,
    stage_tables,
    terminal_table,
)
from trimtab.report.plan_page import write_plan_page
from trimtab.splitting import split_facts, split_tables
from trimtab_adapter.planning.what_if import WhatIfError
from trimtab_pipelines.documents import load_plan
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.scheduling_policies import MAX_SPLIT_ROWS
from trimtab_pipelines.spec import InferencePipeline


def command(
    pipeline: PipelineArgument,
    load: Annotated[
        str | None,
        typer.Option("--load", help="Requests per second; default: what the plan that runs was made for"),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="plan.json of a run: what runs now, so that changes have their price")
    ] = None,
    profiles: ProfilesOption = None,
    what_if: WhatIfOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write a page with the Pareto plots")] = None,
    rows: Annotated[
        int | None,
        typer.Option("--rows", min=1, max=MAX_SPLIT_ROWS, help="Show the cheapest splits of a request of so many rows"),
    ] = None,
    *,
    in_cluster: InClusterOption = False,
    namespace: NamespaceOption = None,
    as_json: JsonOption = False,
) -> int:
    """Explain the plan for a load: what binds, what comes second, what a little more or less would cost."""
    current = None if plan is None else load_plan(plan)
    check_what_if(what_if)
    if not in_cluster:
        _load(load, current)  # before anything is measured
    with aside(as_json):
        made_from = plan_inputs(pipeline, profiles, in_cluster=in_cluster, namespace=namespace)
        made_from = replace(made_from, plan=current or made_from.plan)
        load_rps, document = _load(load, made_from.plan), made_from.pipeline
        decision = decision_at(made_from, load_rps, what_if or [])
        if not as_json:
            _show(document, decision, load_rps)
            for table in split_tables(document, made_from.profiles, rows) if rows else ():
                console.print()
                console.print(table)
        if out is not None:
            write_plan_page(out, document, decision)
            console.print(f"page: {out}")
    if as_json:
        splits = {"splits": split_facts(document, made_from.profiles, rows)} if rows else {}
        write_json_line(plan_view_json(decision) | splits)
    return 0 if decision.plan.spec.feasible else 1


def _show(document: InferencePipeline, decision: PlanView, load_rps: float) -> None:
    for table in stage_tables(document, decision.plan, f"{document.name} at {load_rps:g} requests/s"):
        console.print(table)
    for line in explanation_lines(decision.plan):
        console.print(line)
    console.print()
    console.print(terminal_table(PRICE_COLUMNS, price_rows(decision), "what the next step would cost"))
    if decision.alternatives:
        console.print()
        console.print(terminal_table(ALTERNATIVE_COLUMNS, alternative_rows(decision), "what if"))


def _load(load: str | None, current: PipelinePlan | None) -> float:
    if load is not None:
        return peak_rps(load)
    if current is None or current.spec.forecast is None:
        raise WhatIfError("give --load, the requests per second to explain a plan for, or --plan with one that has it")
    return current.spec.forecast.peak_rps
