"""`trimtab plan`: what would run at a given load, and why; starts nothing."""

import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from trimtab.options import PipelineArgument, ProfilesOption, console
from trimtab.preparation import choose_profiles
from trimtab_adapter.baselines import static_plan
from trimtab_adapter.decide import Situation, decide
from trimtab_pipelines.documents import load_pipeline, load_profiles, write_json
from trimtab_pipelines.plan import ForecastRecord, PipelinePlan


def command(
    pipeline: PipelineArgument,
    load: Annotated[float, typer.Option("--load", min=0.0, help="Requests per second to plan for")],
    profiles: ProfilesOption = None,
    baseline: Annotated[
        Literal["lightest", "heaviest"] | None, typer.Option(help="Plan these variants and never change them")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan as JSON, for `up --plan`")] = None,
) -> int:
    """Show what would run at a load, and why, without running it."""
    document = load_pipeline(pipeline)
    found = load_profiles(choose_profiles(pipeline, document, profiles, console))
    now = time.time()
    if baseline is None:
        forecast = ForecastRecord(peak_rps=load, source="given", reason="--load")
        plan = decide(document, found, Situation(forecast, now))
    else:
        plan = static_plan(document, found, baseline, load, now)
    console.print(_table(plan))
    for line in _words(plan):
        console.print(line)
    if out is not None:
        write_json(out, plan)
        console.print(f"written to {out}")
    return 0


def _table(plan: PipelinePlan) -> Table:
    columns = ("stage", "variant", "batch", "replicas", "cores", "accuracy", "rows/s it can serve", "latency")
    table = Table(*columns, box=None, pad_edge=False)
    for stage in plan.spec.stages:
        table.add_row(
            stage.name,
            stage.variant,
            str(stage.batch_size),
            str(stage.replicas),
            f"{stage.cores * stage.replicas:g}",
            f"{stage.accuracy:.4f}",
            f"{stage.throughput_rps:.0f}",
            f"{1000 * stage.latency_seconds:.1f} ms",
        )
    return table


def _words(plan: PipelinePlan) -> list[str]:
    spec, why = plan.spec, plan.spec.explanation
    lines = []
    if spec.expected is not None:
        expected = spec.expected
        latency = f"latency {1000 * expected.latency_seconds:.1f} ms"
        lines.append(f"expected: accuracy {expected.accuracy:.4f}, {latency}, cores {expected.cores:g}")
    if not spec.feasible:
        lines.append(f"not feasible: {spec.reason}; it carries {100 * spec.planned_fraction:.0f} % of the load")
    if why.binding_constraint:
        lines.append(f"held back by: {why.binding_constraint}")
    if why.runner_up is not None:
        other = ", ".join(f"{stage}: {line}" for stage, line in why.runner_up.stages.items())
        lines.append(f"next best: {other} (objective {why.runner_up.objective_loss:.4f} less)")
    return lines
