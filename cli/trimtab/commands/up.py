"""`trimtab up`: serves a pipeline on this machine."""

import math
from pathlib import Path
from typing import Annotated

import typer

from trimtab.commands.demo import accounting
from trimtab.load_options import (
    EdgeOption,
    NoProxyOption,
    check_chats,
    check_load,
    check_samples,
    default_client,
    parse_load_options,
)
from trimtab.local.supervisor import Setup
from trimtab.options import (
    LIVE_PAGE_PORT,
    PagePortOption,
    PipelineArgument,
    ProfilesOption,
    ReportOption,
    SampledLoadArguments,
    console,
)
from trimtab.preflight import choose_profiles, prepare, require_free_ports
from trimtab.report.summary import print_summary
from trimtab.report.summary_stats import run_stats
from trimtab.run import LocalRun
from trimtab.run_folder import RunFolder, reports_folder
from trimtab.terminal_view import run_in_terminal
from trimtab_loadtester.load_spec import LoadError
from trimtab_pipelines.documents import DocumentError, load_plan, pipeline_folder
from trimtab_pipelines.errors import UserError


def command(
    pipeline: PipelineArgument,
    load: SampledLoadArguments,
    rest_port: Annotated[int, typer.Option(min=0, max=65535, help="REST port; 0: a free port")] = 8080,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port; 0: a free port")] = 8081,
    admin_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of metrics, state and arrivals; 0: a free port")
    ] = 8082,
    page_port: PagePortOption = LIVE_PAGE_PORT,
    edge: EdgeOption = None,
    admin_keys: Annotated[
        Path | None, typer.Option(help="Keys of clients that may register tasks, as `trimtab keys new` prints them")
    ] = None,
    profiles: ProfilesOption = None,
    plan: Annotated[Path | None, typer.Option(help="Run this plan and do not adapt")] = None,
    report: ReportOption = None,
    prometheus: Annotated[str | None, typer.Option(help="URL of a Prometheus to read the arrival rate from")] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder of plans, decisions and logs; kept after the run")] = None,
    *,
    no_proxy: NoProxyOption = False,
) -> int:
    """Serve a pipeline on this machine and adapt it to its load, until the load ends or Ctrl-C."""
    document = prepare(pipeline)
    if folder is not None and folder.resolve() == pipeline_folder(pipeline):
        raise DocumentError(f"--folder {folder} is the pipeline's folder, which a run overwrites; give another")
    client = default_client(document, load.samples) if load.load is not None or load.trace is not None else "REST"
    load_options = parse_load_options(load, samples=load.samples, protocol=client)
    if load.duration_seconds is not None and not 0 < load.duration_seconds < math.inf:
        raise LoadError(f"--duration {load.duration_seconds:g}: seconds must be above 0, and finite")
    if no_proxy and edge is not None:
        raise UserError("--no-proxy cannot be combined with --edge: Envoy provides TLS, API keys, JWT and rate limits")
    check_load(load_options, edge)
    check_samples(document, load.samples)
    check_chats(document, load_options)
    fixed_plan = load_plan(plan) if plan else None
    require_free_ports(rest_port=rest_port, grpc_port=0 if no_proxy else grpc_port, admin_port=admin_port)
    with RunFolder(folder) as run_folder:
        setup = Setup(
            pipeline,
            run_folder,
            None if fixed_plan else choose_profiles(pipeline, document, profiles),
            fixed_plan,
            rest_port,
            grpc_port,
            prometheus,
            admin_port,
            proxy=not no_proxy,
            edge=edge,
            admin_keys=admin_keys,
        )
        local_run = LocalRun(document.name, setup, load_options, load.duration_seconds, page_port=page_port)
        run = run_in_terminal(local_run, console)
    print_summary(run, console)
    from trimtab.report.page import write_report  # noqa: PLC0415  (imports plotly, which a run does not need)

    write_report(report or (folder or reports_folder()) / f"{document.name}.html", [run])
    if load_options is None:
        return 0  # without a load, any end is normal
    if local_run.interruption_code is not None:
        return local_run.interruption_code
    violated = [bar for bar in accounting(run_stats(run)) if not bar.holds]
    for bar in violated:
        console.print(f"! {bar.bar}: {bar.value:g}, expected {bar.bound}")
    return 1 if violated else 0
