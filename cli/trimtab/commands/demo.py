"""`trimtab demo`: the bundled pipeline under the bundled load for three minutes, with its report and its bars."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from trimtab.demo_load import changing_load
from trimtab.load_options import default_client
from trimtab.local.load_process import LoadOptions
from trimtab.local.supervisor import Setup
from trimtab.options import LIVE_PAGE_PORT, OutFolderOption, PagePortOption, SeedOption, console
from trimtab.preflight import choose_profiles, prepare
from trimtab.report.page import write_report
from trimtab.report.summary import print_summary
from trimtab.report.summary_stats import RunStats, run_stats
from trimtab.run import LocalRun
from trimtab.run_folder import RunFolder, reports_folder
from trimtab.run_record import save
from trimtab.terminal_view import terminal_view
from trimtab_loadtester.load_spec import LoadSpec
from trimtab_pipelines.documents import load_profiles
from trimtab_pipelines.result_line import ResultLine, Threshold, threshold

DEMO_SECONDS = 180.0


def command(
    pipeline: Annotated[Path, typer.Argument(metavar="[PIPELINE]", help="What to serve")] = Path("pipelines/digits"),
    load: Annotated[
        str | None, typer.Option("--load", help="What to send; default: what makes every stage change on this machine")
    ] = None,
    duration: Annotated[float, typer.Option(help="Seconds")] = DEMO_SECONDS,
    seed: SeedOption = 0,
    page_port: PagePortOption = LIVE_PAGE_PORT,
    out: OutFolderOption = None,
) -> int:
    """Serve the digits pipeline under a changing load, adapt it live, and show what happened."""
    out = out or reports_folder()
    document = prepare(pipeline)
    if load is not None:
        LoadSpec.parse(load)
    wire = default_client(document, None)
    profile_file = choose_profiles(pipeline, document, None, console)
    load = load or changing_load(document, load_profiles(profile_file)).load()
    order = LoadOptions(load, duration_seconds=duration, seed=seed, wire=wire)
    with RunFolder() as where:
        setup = Setup(pipeline, where, profile_file)
        session = LocalRun(
            f"{document.name}, adapted live", setup, order, page_port=None if page_port < 0 else page_port
        )
        with terminal_view(session, console):
            run = asyncio.run(session.run())
    print_summary(run, console)
    save(run, out / "demo")
    write_report(out / "demo.html", [run])
    console.print(f"report: {out / 'demo.html'}")
    if session.interruption_code is not None:
        return session.interruption_code
    outcome = demo_result(run_stats(run))
    outcome.print()
    return 0 if outcome.holds else 1


def demo_result(figures: RunStats) -> ResultLine:
    """Judge a demo by what it promises."""
    fewest = min(figures.variant_changes.values())
    values: dict[str, float | int | str | None] = {
        "received_requests": figures.received,
        **{f"{name}_requests": count for name, count in figures.outcomes.items()},
        "within_slo_fraction": figures.slo_fraction,
        "expected_accuracy": figures.expected_accuracy,
        "measured_accuracy": figures.measured_accuracy,
        "latency_p50_seconds": figures.p50_seconds,
        "latency_p99_seconds": figures.p99_seconds,
        "mean_cores": figures.mean_cores,
        "plan_changes": figures.plan_changes,
        **{f"variant_changes_{stage}": count for stage, count in figures.variant_changes.items()},
    }
    return ResultLine(name="demo", figures=values, bars=(*accounting(figures), *_adaptation(figures, fewest)))


def accounting(figures: RunStats) -> tuple[Threshold, ...]:
    """Every request has one outcome, and none failed."""
    counted = sum(figures.outcomes.values())
    return (
        threshold("failed requests", figures.outcomes.get("failed", 0), "==", 0),
        threshold("received - ok - late - dropped - refused - failed", figures.received - counted, "==", 0),
    )


def _adaptation(figures: RunStats, fewest_changes: int) -> tuple[Threshold, ...]:
    return (
        threshold("|measured - expected| accuracy", figures.accuracy_gap, "<=", 0.02),
        threshold("variant changes of the stage that changed least", fewest_changes, ">=", 2),
        threshold("greatest over least load", figures.load_ratio, ">=", 4),
    )
