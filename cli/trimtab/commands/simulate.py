"""`trimtab simulate`: simulates a pipeline under a load; starts nothing."""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from trimtab.commands.demo import accounting
from trimtab.load_options import parse_load_options
from trimtab.local import profile_cache
from trimtab.options import LoadArguments, OutFolderOption, PipelineArgument, console
from trimtab.report.page import write_report
from trimtab.report.summary import print_summary
from trimtab.report.summary_stats import RunStats, run_stats
from trimtab.run_folder import reports_folder
from trimtab.run_record import save
from trimtab.simulated_run import simulated_run
from trimtab_adapter.controller import Controller
from trimtab_adapter.planning.decide import initial_plan
from trimtab_adapter.simulation.environment import Environment, Failure
from trimtab_adapter.simulation.result import SimulationResult
from trimtab_adapter.simulation.simulator import Scenario, forecaster_of, simulate
from trimtab_loadtester.arrivals import poisson_arrivals
from trimtab_loadtester.load_spec import LoadError
from trimtab_pipelines.documents import (
    DocumentError,
    load_pipeline,
    load_plan,
    load_profiles,
    pipeline_folder,
    validate_plan,
)
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.result_line import ResultLine
from trimtab_pipelines.spec import InferencePipeline
from trimtab_profiler.profile import PROFILE_FILE

_FAILURE = re.compile(r"^(?P<stage>[A-Za-z0-9_-]+)@(?P<seconds>[0-9]+(\.[0-9]*)?)$")


def command(
    pipeline: PipelineArgument,
    load: LoadArguments,
    profiles: Annotated[
        Path | None, typer.Option("--profiles", help="Profile file; default: the one next to the pipeline")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Run this plan and do not adapt")] = None,
    startup: Annotated[float, typer.Option(min=0.0, max=86400.0, help="Start-up time of a replica in seconds")] = 8.0,
    fail: Annotated[
        list[str] | None, typer.Option("--fail", help="Lose a replica of a stage: STAGE@SECONDS; repeatable")
    ] = None,
    images: Annotated[
        list[int] | None,
        typer.Option("--images", min=0, max=16, help="Images per chat; repeatable: chats take the values in turn"),
    ] = None,
    text_tokens: Annotated[
        list[int] | None,
        typer.Option("--text-tokens", min=1, help="Text tokens per chat; repeatable: chats take the values in turn"),
    ] = None,
    out: OutFolderOption = None,
) -> int:
    """Simulate a pipeline under a load with the router's own scheduler."""
    out = out or reports_folder()
    document = load_pipeline(pipeline)
    failures = tuple(_failure(text, document) for text in fail or ())
    options = parse_load_options(load)
    if options is None:
        raise LoadError("no load: give --trace FILE or --load, such as --load constant:20 --duration 60")
    profiles_by_stage = _profiles(pipeline, document, profiles)
    fixed_plan = validate_plan(load_plan(plan), document) if plan else None
    started_at = time.time()
    rates = options.spec().rates(load.duration_seconds)
    arrivals = poisson_arrivals(rates, load.seed, load.duration_seconds)
    forecaster = forecaster_of(document.spec.adaptation, arrivals, len(rates), started_at)
    scenario = Scenario(
        pipeline=document,
        profiles=profiles_by_stage,
        arrivals_seconds=arrivals,
        duration_seconds=float(len(rates)) if load.duration_seconds is None else load.duration_seconds,
        plan=fixed_plan or initial_plan(document, profiles_by_stage, now_seconds=started_at),
        controller=None if fixed_plan else Controller(forecaster),
        origin_seconds=started_at,
        environment=Environment(startup_seconds=startup, failures=failures),
        images=tuple(images or ()),
        text_tokens=tuple(text_tokens or ()),
        seed=load.seed,
    )
    start = time.perf_counter()
    simulation = simulate(scenario)
    wall_seconds = time.perf_counter() - start
    run = simulated_run(f"{document.name}, simulated", options.spec().text, scenario, simulation, started_at)
    print_summary(run, console)
    console.print(
        f"{scenario.duration_seconds:.0f} s of load, {simulation.outcomes.size:,} requests, simulated in "
        f"{wall_seconds:.2f} s ({scenario.duration_seconds / wall_seconds:,.0f} times real time)"
    )
    save(run, out / "simulate")
    write_report(out / "simulate.html", [run])
    result = simulation_result(run_stats(run), simulation, wall_seconds)
    result.print()
    return 0 if result.holds else 1


def _profiles(pipeline_file: Path, document: InferencePipeline, requested: Path | None) -> Mapping[str, ModelProfile]:
    """Load the given profile, else the one next to the pipeline from whatever machine, else one measured here."""
    own = pipeline_folder(pipeline_file) / PROFILE_FILE
    if requested is None and own.exists():
        requested = own
    choice = profile_cache.find_profile(pipeline_file, document, requested, console.print)
    if choice is None:
        raise DocumentError(f"{document.name} has no profile: give --profiles FILE, or run `trimtab profile`")
    console.print(f"profile {choice.path} ({choice.reason})")
    return load_profiles(choice.path)


def _failure(text: str, document: InferencePipeline) -> Failure:
    match = _FAILURE.match(text)
    names = [stage.name for stage in document.spec.stages]
    if match is None or match["stage"] not in names:
        raise LoadError(f"--fail {text!r}: write STAGE@SECONDS, such as {names[0]}@30; stages: {', '.join(names)}")
    return Failure(float(match["seconds"]), match["stage"])


def simulation_result(stats: RunStats, simulation: SimulationResult, wall_seconds: float) -> ResultLine:
    figures = stats.figures() | {
        "mean_cores": simulation.mean_cores,
        "replicas_started": simulation.starts,
        **{f"batch_rows_{stage}": rows for stage, rows in simulation.batch_rows.items()},
        "wall_seconds": wall_seconds,
        "times_real_time": simulation.duration_seconds / wall_seconds,
    }
    return ResultLine(name="simulate", figures=figures, bars=accounting(stats))
