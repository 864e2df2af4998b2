"""`trimtab plan`: shows the plan for a load; starts nothing."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from trimtab.kubernetes_access import PLAN, PROFILE, connected, get_pipeline, namespaced_name, resource_flavors
from trimtab.options import PipelineArgument, PlanArguments, console, console_to_stderr, print_json_line, terminal_table
from trimtab.plan_view import (
    ALTERNATIVE_COLUMNS,
    PlanView,
    alternative_rows,
    explanation_lines,
    plan_view_json,
    stage_tables,
)
from trimtab.preflight import choose_profiles
from trimtab_adapter.planning.baselines import static_plan
from trimtab_adapter.planning.decide import PlanningInputs, build_plan, planning_problem
from trimtab_adapter.planning.relaxation import solve_or_relax
from trimtab_adapter.planning.what_if import WhatIfError, parse_what_if, solve_alternatives
from trimtab_loadtester.load_spec import LoadSpec
from trimtab_pipelines.documents import load_pipeline, load_profiles, parse_plan, write_json
from trimtab_pipelines.plan import ForecastRecord, PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Inputs of a plan."""

    pipeline: InferencePipeline
    profiles: Mapping[str, ModelProfile]
    """By stage."""
    plan: PipelinePlan | None = None
    """The current plan, if known."""


def command(
    pipeline: PipelineArgument,
    load: Annotated[
        str, typer.Option("--load", help="Requests per second to plan for; the peak of a load that varies")
    ],
    arguments: PlanArguments,
    baseline: Annotated[
        Literal["lightest", "heaviest"] | None, typer.Option(help="Plan these variants instead of the best ones")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Path of the plan as JSON, for `up --plan`")] = None,
) -> int:
    """Show the plan for a load without running it."""
    if arguments.what_if and baseline:
        raise WhatIfError("--what-if cannot be combined with --baseline, whose variants are fixed")
    load_rps = peak_rps(load)
    check_what_if(arguments.what_if)
    with console_to_stderr(arguments.as_json):
        inputs = plan_inputs(pipeline, arguments)
        if baseline:
            view, plan = None, static_plan(inputs.pipeline, inputs.profiles, baseline, load_rps, time.time())
        else:
            view = plan_view(inputs, load_rps, arguments.what_if or [])
            plan = view.plan
        if not arguments.as_json:
            print_plan(inputs.pipeline, plan)
            print_alternatives(view)
        if out is not None:
            write_json(out, plan)
            console.print(f"plan written to {out}")
    if arguments.as_json:
        plan_json = {"plan": plan.model_dump(mode="json", by_alias=True, exclude_none=True)}
        print_json_line(plan_view_json(view) if view else plan_json)
    return 0 if plan.spec.feasible else 1


def plan_inputs(pipeline: Path, arguments: PlanArguments) -> PlanInputs:
    """Read the inputs; a profile file takes precedence over the cluster's profiles.

    Raises StartError if the cluster has no such pipeline. Raises DocumentError if a document cannot be read.
    """
    profiles = arguments.profiles
    if arguments.in_cluster:
        inputs = asyncio.run(_from_cluster(*namespaced_name(pipeline, arguments.namespace)))
        return inputs if profiles is None else replace(inputs, profiles=load_profiles(profiles))
    document = load_pipeline(pipeline)
    return PlanInputs(document, load_profiles(choose_profiles(pipeline, document, profiles, prepared=False)))


async def _from_cluster(namespace: str, name: str) -> PlanInputs:
    async with connected() as cluster:
        pipeline = await get_pipeline(cluster, namespace, name)
        profiles = (await cluster.list(PROFILE, namespace)).items
        plan = await cluster.get(PLAN, namespace, name)
        flavors = await resource_flavors(cluster)
    # Imported here: these modules need the Kubernetes client, an optional dependency.
    from trimtab_adapter.cluster.config_source import ClusterCache, ClusterConfigSource  # noqa: PLC0415

    cache = ClusterCache()
    for document in (pipeline, *profiles):
        cache.put(document)
    source = ClusterConfigSource(cache, (namespace, name), flavors)
    if source.remark:
        console.print(source.remark)
    parsed = None if plan is None else parse_plan(plan, f"{PLAN} {namespace}/{name}")
    return PlanInputs(source.pipeline, source.profiles, parsed)


def peak_rps(load: str) -> float:
    """Return the peak of a load; raises LoadError."""
    return float(LoadSpec.parse(load).pattern_rps.max())


def check_what_if(what_if: list[str] | None) -> None:
    """Raise WhatIfError if one cannot be parsed, before any profile is measured."""
    for text in what_if or ():
        parse_what_if(text)


def plan_view(inputs: PlanInputs, load_rps: float, what_if: list[str]) -> PlanView:
    """Plan for a load and for each alternative; the current plan, if any, adds switching costs."""
    now = time.time()
    forecast = ForecastRecord(peak_rps=load_rps, source="given", reason="--load")
    problem, forecast = planning_problem(inputs.pipeline, inputs.profiles, PlanningInputs(forecast, now, inputs.plan))
    alternatives = [alternative for text in what_if for alternative in solve_alternatives(problem, text)]
    solution = solve_or_relax(problem)
    return PlanView(build_plan(inputs.pipeline, problem, solution, forecast, now), problem, solution, alternatives)


def print_plan(pipeline: InferencePipeline, plan: PipelinePlan, title: str = "") -> None:
    for part in (*stage_tables(pipeline, plan, title), *explanation_lines(plan)):
        console.print(part)


def print_alternatives(view: PlanView | None) -> None:
    if view and view.alternatives:
        console.print()
        console.print(terminal_table(ALTERNATIVE_COLUMNS, alternative_rows(view), "what-if"))
