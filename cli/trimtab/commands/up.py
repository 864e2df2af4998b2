"""`trimtab up`: serve a pipeline on this machine, adapted to its load."""

import asyncio
import math
from pathlib import Path
from typing import Annotated

import typer

from trimtab.commands.demo import accounting
from trimtab.load_options import check_chats, check_load, check_samples, default_client, door, parse_load_options
from trimtab.local.supervisor import Setup
from trimtab.options import (
    LIVE_PAGE_PORT,
    DurationOption,
    EdgeOption,
    LoadOption,
    PagePortOption,
    PipelineArgument,
    ProfilesOption,
    ReportOption,
    SamplesOption,
    ScaleOption,
    SeedOption,
    SpeedUpOption,
    TraceOption,
    console,
)
from trimtab.preflight import choose_profiles, prepare
from trimtab.report.page import write_report
from trimtab.report.summary import print_summary
from trimtab.report.summary_stats import run_stats
from trimtab.run import LocalRun
from trimtab.run_folder import RunFolder, reports_folder
from trimtab.terminal_view import terminal_view
from trimtab_loadtester.load_spec import LoadError
from trimtab_pipelines.documents import DocumentError, load_plan


def command(
    pipeline: PipelineArgument,
    load: LoadOption = None,
    trace: TraceOption = None,
    speed_up: SpeedUpOption = 1.0,
    scale: ScaleOption = 1.0,
    duration: DurationOption = None,
    seed: SeedOption = 0,
    samples: SamplesOption = None,
    rest_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of REST; 0 takes a free one")] = 8080,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of gRPC; 0 takes a free one")] = 8081,
    admin_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of metrics, state and load; 0 takes a free one")
    ] = 8082,
    page_port: PagePortOption = LIVE_PAGE_PORT,
    edge: EdgeOption = None,
    admin_keys: Annotated[
        Path | None, typer.Option(help="Keys of those who may register tasks, as `trimtab keys new` writes them")
    ] = None,
    profiles: ProfilesOption = None,
    plan: Annotated[Path | None, typer.Option(help="Run this plan and never change it")] = None,
    report: ReportOption = None,
    prometheus: Annotated[str | None, typer.Option(help="Take the load from this Prometheus")] = None,
    folder: Annotated[Path | None, typer.Option(help="Keep plans, decisions and logs here")] = None,
) -> int:
    """Serve a pipeline on this machine, adapted to its load, until Ctrl-C or the end of the load."""
    document = prepare(pipeline)
    if folder is not None and folder.resolve() == (pipeline if pipeline.is_dir() else pipeline.parent).resolve():
        raise DocumentError(f"--folder {folder} is the pipeline's own, whose files a run writes over; give another")
    wire = default_client(document, samples) if load is not None or trace is not None else "REST"
    order = parse_load_options(load, trace, speed_up, scale, duration, seed, samples=samples, wire=wire)
    if duration is not None and not 0 < duration < math.inf:
        raise LoadError(f"--duration {duration:g}: seconds must be above 0, and finite")
    stands = door(edge)
    check_load(order, stands["edge"])
    check_samples(document, samples)
    check_chats(document, order)
    fixed = load_plan(plan) if plan else None
    with RunFolder(folder) as where:
        profile_file = None if fixed else choose_profiles(pipeline, document, profiles, console)
        setup = Setup(
            pipeline,
            where,
            profile_file,
            fixed,
            rest_port,
            grpc_port,
            prometheus,
            admin_port,
            admin_keys=admin_keys,
            **stands,
        )
        session = LocalRun(document.name, setup, order, duration, page_port=None if page_port < 0 else page_port)
        with terminal_view(session, console):
            run = asyncio.run(session.run())
    print_summary(run, console)
    written = report or (folder or reports_folder()) / f"{document.name}.html"
    write_report(written, [run])
    console.print(f"report: {written}")
    if order is None:
        return 0  # nobody said when it ends, so each end is the right one
    if session.interruption_code is not None:
        return session.interruption_code
    broken = [bar for bar in accounting(run_stats(run)) if not bar.holds]
    for bar in broken:
        console.print(f"! {bar.bar}: {bar.value:g}, where {bar.bound} is right")
    return 1 if broken else 0
