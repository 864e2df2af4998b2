"""`trimtab simulate`: what would happen under a load, in simulated time; starts nothing."""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from trimtab.commands.demo import accounting
from trimtab.load_options import parse_load_options
from trimtab.local import profile_cache as known_profiles
from trimtab.options import (
    DurationOption,
    LoadOption,
    OutFolderOption,
    PipelineArgument,
    ScaleOption,
    SeedOption,
    SpeedUpOption,
    TraceOption,
    console,
)
from trimtab.report.page import write_report
from trimtab.report.summary import print_summary
from trimtab.report.summary_stats import RunStats, run_stats
from trimtab.run_folder import reports_folder
from trimtab.run_record import save
from trimtab.simulated_run import run_of
from trimtab_adapter.planning.decide import initial_plan
from trimtab_adapter.simulation.control_loop import SimulatedControlLoop, oracle_forecaster
from trimtab_adapter.simulation.environment import Environment, Failure
from trimtab_adapter.simulation.result import SimulationResult
from trimtab_adapter.simulation.simulator import Scenario, simulate
from trimtab_loadtester.arrivals import poisson_arrivals
from trimtab_loadtester.load_spec import LoadError
from trimtab_pipelines.documents import DocumentError, load_pipeline, load_plan, load_profiles
from trimtab_pipelines.plan_validation import validate_plan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.result_line import ResultLine
from trimtab_pipelines.spec import InferencePipeline
from trimtab_profiler.profile import PROFILE_FILE

_FAILURE = re.compile(r"^(?P<stage>[A-Za-z0-9_-]+)@(?P<seconds>[0-9]+(\.[0-9]*)?)$")


def command(
    pipeline: PipelineArgument,
    profiles: Annotated[
        Path | None, typer.Option("--profiles", help="Profile to go by; default: the one beside the pipeline")
    ] = None,
    load: LoadOption = None,
    trace: TraceOption = None,
    speed_up: SpeedUpOption = 1.0,
    scale: ScaleOption = 1.0,
    duration: DurationOption = None,
    seed: SeedOption = 0,
    plan: Annotated[Path | None, typer.Option(help="Run this plan and never change it; default: adapt")] = None,
    startup: Annotated[
        float, typer.Option(min=0.0, max=86400.0, help="Seconds a new replica needs to become ready")
    ] = 8.0,
    fail: Annotated[
        list[str] | None, typer.Option("--fail", help="Lose a replica: STAGE@SECONDS; may be given several times")
    ] = None,
    images: Annotated[
        list[int] | None,
        typer.Option("--images", min=0, max=16, help="Images that a chat shows; given several times, chats take turns"),
    ] = None,
    text_tokens: Annotated[
        list[int] | None,
        typer.Option("--text-tokens", min=1, help="Tokens of a chat's words; given several times, chats take turns"),
    ] = None,
    out: OutFolderOption = None,
) -> int:
    """Simulate a pipeline under a load with the router's own code: what would be late or dropped, and at what cost."""
    out = out or reports_folder()
    document = load_pipeline(pipeline)
    failures = tuple(_failure(text, document) for text in fail or ())
    order = parse_load_options(load, trace, speed_up, scale, duration, seed)
    if order is None:
        raise LoadError("nothing to simulate: give --trace FILE or --load, such as --load constant:20 --duration 60")
    found_profiles = _profiles(pipeline, document, profiles)
    fixed = validate_plan(load_plan(plan), document) if plan else None
    started_at = time.time()
    rates = order.spec().rates(duration)
    arrivals = poisson_arrivals(rates, seed, duration)
    adaptation = None
    if fixed is None:
        forecaster = oracle_forecaster(document.spec.adaptation, arrivals, len(rates), started_at)
        adaptation = SimulatedControlLoop(forecaster, origin_seconds=started_at)
    scenario = Scenario(
        pipeline=document,
        profiles=found_profiles,
        arrivals_seconds=arrivals,
        duration_seconds=float(len(rates)) if duration is None else duration,
        plan=fixed or initial_plan(document, found_profiles, now_seconds=started_at),
        adaptation=adaptation,
        environment=Environment(startup_seconds=startup, failures=failures),
        images=tuple(images or ()),
        text_tokens=tuple(text_tokens or ()),
        seed=seed,
    )
    began = time.perf_counter()
    found = simulate(scenario)
    spent = time.perf_counter() - began
    title = f"{document.name}, simulated"
    run = run_of(title, order.spec().text, scenario, found, started_at)
    print_summary(run, console)
    pace = f"{scenario.duration_seconds:.0f} s of load, {found.outcomes.size:,} requests, simulated in {spent:.2f} s"
    console.print(f"{pace} ({scenario.duration_seconds / spent:,.0f} times real time)")
    save(run, out / "simulate")
    write_report(out / "simulate.html", [run])
    console.print(f"report: {out / 'simulate.html'}")
    outcome = simulation_result(run_stats(run), found, spent)
    outcome.print()
    return 0 if outcome.holds else 1


def _profiles(pipeline_file: Path, document: InferencePipeline, chosen: Path | None) -> Mapping[str, ModelProfile]:
    """Read the profile asked for, or the one beside the pipeline whatever machine it is of, or one measured here."""
    beside = (pipeline_file if pipeline_file.is_dir() else pipeline_file.parent) / PROFILE_FILE
    if chosen is None and beside.exists():
        chosen = beside
    choice = known_profiles.find_profile(pipeline_file, document, chosen, console.print)
    if choice is None:
        raise DocumentError(f"{document.name} has no profile: give --profiles FILE, or measure with `trimtab profile`")
    console.print(f"profile {choice.path} ({choice.why})")
    return load_profiles(choice.path)


def _failure(text: str, document: InferencePipeline) -> Failure:
    match = _FAILURE.match(text)
    names = [stage.name for stage in document.spec.stages]
    if match is None or match["stage"] not in names:
        raise LoadError(f"--fail {text!r}: write STAGE@SECONDS, such as {names[0]}@30; stages: {', '.join(names)}")
    return Failure(float(match["seconds"]), match["stage"])


def simulation_result(figures: RunStats, found: SimulationResult, spent_seconds: float) -> ResultLine:
    """Tell what came of it, and that every request has one end."""
    values: dict[str, float | int | str | None] = {
        "received_requests": figures.received,
        **{f"{name}_requests": count for name, count in figures.outcomes.items()},
        "within_slo_fraction": figures.slo_fraction,
        "expected_accuracy": figures.expected_accuracy,
        "latency_p50_seconds": figures.p50_seconds,
        "latency_p99_seconds": figures.p99_seconds,
        "mean_cores": found.mean_cores,
        "plan_changes": figures.plan_changes,
        "replicas_started": found.starts,
        **{f"batch_rows_{stage}": rows for stage, rows in found.batch_rows.items()},
        "wall_seconds": spent_seconds,
        "times_real_time": found.duration_seconds / spent_seconds,
    }
    return ResultLine(name="simulate", figures=values, bars=accounting(figures))
