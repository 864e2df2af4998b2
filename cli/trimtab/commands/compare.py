"""`trimtab compare`: the same load against adaptation, the lightest and the heaviest variants, on the same cores."""

import asyncio
import math

from trimtab.commands.demo import DEMO_SECONDS, accounting
from trimtab.demo_load import changing_load
from trimtab.load_options import check_chats, check_samples, default_client, located, parse_load_options
from trimtab.local.load_process import LoadOptions
from trimtab.local.supervisor import Setup
from trimtab.options import (
    DurationOption,
    LoadOption,
    OutFolderOption,
    PipelineArgument,
    ProfilesOption,
    SamplesOption,
    ScaleOption,
    SeedOption,
    SpeedUpOption,
    TraceOption,
    console,
)
from trimtab.preflight import choose_profiles, prepare
from trimtab.report.page import write_report
from trimtab.report.summary import print_comparison
from trimtab.report.summary_stats import RunStats, run_stats
from trimtab.run import LocalRun
from trimtab.run_folder import RunFolder, reports_folder
from trimtab.run_record import save
from trimtab.run_samples import Run
from trimtab.terminal_view import terminal_view
from trimtab_adapter.planning.baselines import static_plan
from trimtab_pipelines.documents import load_profiles
from trimtab_pipelines.result_line import ResultLine, threshold

CLIMBING_SEED = 1  # of the bundled load: it visits every rate once on the way up, and most of them on the way down
ADAPTIVE, LIGHTEST, HEAVIEST = "adaptive", "static-lightest", "static-heaviest"


def command(
    pipeline: PipelineArgument,
    load: LoadOption = None,
    trace: TraceOption = None,
    speed_up: SpeedUpOption = 1.0,
    scale: ScaleOption = 1.0,
    duration: DurationOption = None,
    seed: SeedOption = 0,
    samples: SamplesOption = None,
    profiles: ProfilesOption = None,
    out: OutFolderOption = None,
) -> int:
    """Serve the same arrivals and payloads three times: adapted live, lightest and heaviest variants; compare."""
    out = out or reports_folder()
    document = prepare(pipeline)
    wire, sent = default_client(document, samples), samples if load or trace else None
    order = parse_load_options(load, trace, speed_up, scale, duration, seed, samples=sent, wire=wire)
    check_samples(document, samples)
    check_chats(document, order)
    profile_file = choose_profiles(pipeline, document, profiles, console)
    found = load_profiles(profile_file)
    if order is None:
        written, length = changing_load(document, found).load(CLIMBING_SEED), duration or DEMO_SECONDS
        order = LoadOptions(written, duration_seconds=length, seed=seed, wire=wire, samples=located(samples))
    console.print(f"load {order.spec().text}")
    peak_rps = float(order.spec().rates(order.duration_seconds).max())
    setups = {
        ADAPTIVE: (profile_file, None),
        LIGHTEST: (None, static_plan(document, found, "lightest", peak_rps)),
        HEAVIEST: (None, static_plan(document, found, "heaviest", peak_rps)),
    }
    runs: list[Run] = []
    for title, (its_profile, plan) in setups.items():
        console.print(title, style="bold")
        with RunFolder() as where:
            session = LocalRun(title, Setup(pipeline, where, its_profile, plan), order)
            with terminal_view(session, console):
                runs.append(asyncio.run(session.run()))
        if session.interruption_code is not None:
            return session.interruption_code
        save(runs[-1], out / "compare" / title)
    print_comparison(runs, console)
    write_report(out / "compare.html", runs)
    console.print(f"report: {out / 'compare.html'}")
    outcome = comparison_result(*map(run_stats, runs))
    outcome.print()
    return 0 if outcome.holds else 1


def comparison_result(adaptive: RunStats, lightest: RunStats, heaviest: RunStats) -> ResultLine:
    """Judge adaptation by what lies between the two that never change."""
    between = heaviest.measured_accuracy - lightest.measured_accuracy
    gained = adaptive.measured_accuracy - lightest.measured_accuracy
    share = gained / between if between > 0 else math.nan
    values: dict[str, float | int | str | None] = {}
    for name, figures in (("adaptive", adaptive), ("lightest", lightest), ("heaviest", heaviest)):
        values |= {
            f"{name}_received_requests": figures.received,
            f"{name}_measured_accuracy": figures.measured_accuracy,
            f"{name}_expected_accuracy": figures.expected_accuracy,
            f"{name}_within_slo_fraction": figures.slo_fraction,
            f"{name}_latency_p99_seconds": figures.p99_seconds,
            f"{name}_mean_cores": figures.mean_cores,
        }
    bars = (
        *accounting(adaptive),
        threshold("share of the accuracy between lightest and heaviest", share, ">=", 0.5),
        threshold("adaptive: fraction within the SLO", adaptive.slo_fraction, ">=", 0.98),
        threshold("heaviest: fraction within the SLO", heaviest.slo_fraction, "<=", 0.9),
        threshold("adaptive: |measured - expected| accuracy", adaptive.accuracy_gap, "<=", 0.02),
    )
    return ResultLine(name="compare", figures=values, bars=bars)
