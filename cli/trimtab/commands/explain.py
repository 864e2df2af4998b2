"""`trimtab explain`: explains a plan by its binding constraint, its runner-up and its sensitivity."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from trimtab.commands.plan import check_what_if, peak_rps, plan_inputs, plan_view, print_alternatives, print_plan
from trimtab.options import PipelineArgument, PlanArguments, console, console_to_stderr, print_json_line, terminal_table
from trimtab.plan_view import SENSITIVITY_COLUMNS, legend_lines, plan_view_json, sensitivity_rows
from trimtab_adapter.planning.what_if import WhatIfError
from trimtab_pipelines.documents import load_plan
from trimtab_pipelines.plan import PipelinePlan


def command(
    pipeline: PipelineArgument,
    arguments: PlanArguments,
    load: Annotated[
        str | None, typer.Option("--load", help="Requests per second; default: the load of the current plan")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="Current plan, plan.json of a run; adds switching costs")
    ] = None,
) -> int:
    """Explain the plan for a load: its binding constraint, the runner-up, and its sensitivity."""
    current_plan = None if plan is None else load_plan(plan)
    check_what_if(arguments.what_if)
    if not arguments.in_cluster:
        _load_rps(load, current_plan)  # fails before any profile is measured
    with console_to_stderr(arguments.as_json):
        inputs = plan_inputs(pipeline, arguments)
        inputs = replace(inputs, plan=current_plan or inputs.plan)
        load_rps = _load_rps(load, inputs.plan)
        view = plan_view(inputs, load_rps, arguments.what_if or [])
        if not arguments.as_json:
            print_plan(inputs.pipeline, view.plan, f"{inputs.pipeline.name} at {load_rps:g} requests/s")
            console.print()
            console.print(terminal_table(SENSITIVITY_COLUMNS, sensitivity_rows(view), "sensitivity"))
            print_alternatives(view)
            for line in ("", *view.spot_lines, *legend_lines(inputs.pipeline)):
                console.print(line)
    if arguments.as_json:
        print_json_line(plan_view_json(view))
    return 0 if view.plan.spec.feasible else 1


def _load_rps(load: str | None, current_plan: PipelinePlan | None) -> float:
    if load is not None:
        return peak_rps(load)
    if current_plan is None or current_plan.spec.forecast is None:
        raise WhatIfError("give --load, the requests per second to plan for, or --plan with a plan that records them")
    return current_plan.spec.forecast.peak_rps
