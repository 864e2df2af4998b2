"""`trimtab compare`: adaptation against the lightest and the heaviest variants, at the same load and cores."""

import math

from trimtab.commands.demo import DEMO_SECONDS, accounting
from trimtab.demo_load import changing_load
from trimtab.load_options import absolute_samples, check_chats, check_samples, default_client, parse_load_options
from trimtab.local.load_process import LoadOptions
from trimtab.local.supervisor import Setup
from trimtab.options import OutFolderOption, PipelineArgument, ProfilesOption, SampledLoadArguments, console
from trimtab.preflight import choose_profiles, prepare
from trimtab.report.page import write_report
from trimtab.report.summary import print_comparison
from trimtab.report.summary_stats import RunStats, run_stats
from trimtab.run import LocalRun
from trimtab.run_folder import RunFolder, reports_folder
from trimtab.run_record import save
from trimtab.run_samples import Run
from trimtab.terminal_view import run_in_terminal
from trimtab_adapter.planning.baselines import static_plan
from trimtab_pipelines.documents import load_profiles
from trimtab_pipelines.result_line import ResultLine, threshold

CLIMBING_SEED = 1
"""Seed of the bundled load with which it rises through every rate once and falls through most of them."""
ADAPTIVE, LIGHTEST, HEAVIEST = "adaptive", "static-lightest", "static-heaviest"


def command(
    pipeline: PipelineArgument, load: SampledLoadArguments, profiles: ProfilesOption = None, out: OutFolderOption = None
) -> int:
    """Serve the same load with adaptation, with the lightest and with the heaviest variants; compare."""
    out = out or reports_folder()
    document = prepare(pipeline)
    client = default_client(document, load.samples)
    samples = load.samples if load.load or load.trace else None
    options = parse_load_options(load, samples=samples, protocol=client)
    check_samples(document, load.samples)
    check_chats(document, options)
    profile_file = choose_profiles(pipeline, document, profiles)
    profiles_by_stage = load_profiles(profile_file)
    if options is None:
        options = LoadOptions(
            changing_load(document, profiles_by_stage).spec(CLIMBING_SEED),
            duration_seconds=load.duration_seconds or DEMO_SECONDS,
            seed=load.seed,
            protocol=client,
            samples=absolute_samples(load.samples),
        )
    console.print(f"load {options.spec().text}")
    peak_rps = float(options.spec().rates(options.duration_seconds).max())
    setups = {
        ADAPTIVE: (profile_file, None),
        LIGHTEST: (None, static_plan(document, profiles_by_stage, "lightest", peak_rps)),
        HEAVIEST: (None, static_plan(document, profiles_by_stage, "heaviest", peak_rps)),
    }
    runs: list[Run] = []
    for title, (adapter_profiles, plan) in setups.items():
        console.print(title, style="bold")
        with RunFolder() as folder:
            local_run = LocalRun(title, Setup(pipeline, folder, adapter_profiles, plan), options)
            runs.append(run_in_terminal(local_run, console))
        if local_run.interruption_code is not None:
            return local_run.interruption_code
        save(runs[-1], out / "compare" / title)
    print_comparison(runs, console)
    write_report(out / "compare.html", runs)
    result = comparison_result(*map(run_stats, runs))
    result.print()
    return 0 if result.holds else 1


def comparison_result(adaptive: RunStats, lightest: RunStats, heaviest: RunStats) -> ResultLine:
    """Result line of a comparison: adaptation must lie well between the two static plans."""
    between = heaviest.measured_accuracy - lightest.measured_accuracy
    gained = adaptive.measured_accuracy - lightest.measured_accuracy
    share = gained / between if between > 0 else math.nan
    values: dict[str, float | int | str | None] = {}
    for name, stats in (("adaptive", adaptive), ("lightest", lightest), ("heaviest", heaviest)):
        values |= {f"{name}_{figure}": value for figure, value in stats.figures().items()}
    bars = (
        *accounting(adaptive),
        threshold("share of the accuracy between lightest and heaviest", share, ">=", 0.5),
        threshold("adaptive: fraction within the SLO", adaptive.slo_fraction, ">=", 0.98),
        threshold("heaviest: fraction within the SLO", heaviest.slo_fraction, "<=", 0.9),
        threshold("adaptive: |measured - expected| accuracy", adaptive.accuracy_gap, "<=", 0.02),
    )
    return ResultLine(name="compare", figures=values, bars=bars)
