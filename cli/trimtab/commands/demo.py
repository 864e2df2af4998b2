"""`trimtab demo`: serves the bundled pipeline under the bundled load for three minutes."""

from pathlib import Path
from typing import Annotated

import typer

from trimtab.demo_load import changing_load
from trimtab.load_options import default_client
from trimtab.local.load_process import LoadOptions
from trimtab.local.supervisor import Setup
from trimtab.options import LIVE_PAGE_PORT, OutFolderOption, PagePortOption, SeedOption, console
from trimtab.preflight import choose_profiles, prepare
from trimtab.report.summary import print_summary
from trimtab.report.summary_stats import RunStats, run_stats
from trimtab.run import LocalRun
from trimtab.run_folder import RunFolder, reports_folder
from trimtab.run_record import save
from trimtab.terminal_view import run_in_terminal
from trimtab_loadtester.load_spec import LoadSpec
from trimtab_pipelines.documents import load_profiles
from trimtab_pipelines.result_line import ResultLine, Threshold, threshold
from trimtab_profiler.identity import usable_cores

DEMO_SECONDS = 180.0


def command(
    pipeline: Annotated[Path, typer.Argument(metavar="[PIPELINE]", help="Pipeline to serve")] = Path(
        "pipelines/digits"
    ),
    load: Annotated[
        str | None, typer.Option("--load", help="Load; default: one that makes every stage change on this machine")
    ] = None,
    duration: Annotated[float, typer.Option(help="Seconds")] = DEMO_SECONDS,
    seed: SeedOption = 0,
    page_port: PagePortOption = LIVE_PAGE_PORT,
    out: OutFolderOption = None,
) -> int:
    """Serve the digits pipeline under a changing load, adapt it live, and report the run."""
    out = out or reports_folder()
    document = prepare(pipeline)
    if load is not None:
        LoadSpec.parse(load)
    client = default_client(document, None)
    profile_file = choose_profiles(pipeline, document, None)
    load = load or changing_load(document, load_profiles(profile_file), usable_cores()).spec()
    options = LoadOptions(load, duration_seconds=duration, seed=seed, protocol=client)
    with RunFolder() as folder:
        setup = Setup(pipeline, folder, profile_file)
        local_run = LocalRun(f"{document.name}, adapted live", setup, options, page_port=page_port)
        run = run_in_terminal(local_run, console)
    print_summary(run, console)
    save(run, out / "demo")
    from trimtab.report.page import write_report  # noqa: PLC0415  (imports plotly, which a run does not need)

    write_report(out / "demo.html", [run])
    if local_run.interruption_code is not None:
        return local_run.interruption_code
    result = demo_result(run_stats(run))
    result.print()
    return 0 if result.holds else 1


def demo_result(stats: RunStats) -> ResultLine:
    adaptation = (
        threshold("|measured - expected| accuracy", stats.accuracy_gap, "<=", 0.02),
        threshold("plan changes", stats.plan_changes, ">=", 2),
        threshold("maximum load / minimum load", stats.load_ratio, ">=", 4),
    )
    return ResultLine(name="demo", figures=stats.figures(), bars=(*accounting(stats), *adaptation))


def accounting(stats: RunStats) -> tuple[Threshold, ...]:
    """Thresholds that every run must meet: each request has one outcome, and none failed."""
    return (
        threshold("failed requests", stats.outcomes.get("failed", 0), "==", 0),
        threshold(
            "received - ok - late - dropped - refused - failed", stats.received - sum(stats.outcomes.values()), "==", 0
        ),
    )
