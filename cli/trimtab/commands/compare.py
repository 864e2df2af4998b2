"""`trimtab compare`: adaptation against plans of one variant a stage, and against the lightest and heaviest variants.

All serve the same load on the same cores.
"""

import math
from collections.abc import Mapping

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
from trimtab_adapter.planning.baselines import static_plan, with_single_variants
from trimtab_pipelines.documents import dump_yaml, load_profiles, pipeline_folder, write_atomically
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.result_line import ResultLine, Threshold, threshold
from trimtab_pipelines.spec import InferencePipeline

CLIMBING_SEED = 1
"""Seed of the bundled load with which it rises through every rate once and falls through most of them."""
ADAPTIVE, SINGLE, LIGHTEST, HEAVIEST = "adaptive", "best-single-variants", "static-lightest", "static-heaviest"
"""`SINGLE` adapts too, with plans of one variant a stage."""
EQUAL_ACCURACY = 0.003


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
    setups: dict[str, tuple[InferencePipeline, PipelinePlan | None]] = {
        ADAPTIVE: (document, None),
        SINGLE: (with_single_variants(document), None),
        LIGHTEST: (document, static_plan(document, profiles_by_stage, "lightest", peak_rps)),
        HEAVIEST: (document, static_plan(document, profiles_by_stage, "heaviest", peak_rps)),
    }
    if setups[SINGLE][0].spec.policy_name == document.spec.policy_name:
        del setups[SINGLE]
    runs: dict[str, Run] = {}
    for title, (served, plan) in setups.items():
        console.print(title, style="bold")
        with RunFolder() as folder:
            served_file = folder / "served.yaml"
            write_atomically(served_file, dump_yaml(served))
            adapter_profiles, home = None if plan else profile_file, pipeline_folder(pipeline)
            setup = Setup(served_file, folder, adapter_profiles, plan, home=home)
            local_run = LocalRun(title, setup, options)
            runs[title] = run_in_terminal(local_run, console)
        if local_run.interruption_code is not None:
            return local_run.interruption_code
        save(runs[title], out / "compare" / title)
    print_comparison(list(runs.values()), console)
    write_report(out / "compare.html", list(runs.values()))
    result = comparison_result({title: run_stats(run) for title, run in runs.items()})
    result.print()
    return 0 if result.holds else 1


def comparison_result(stats: Mapping[str, RunStats]) -> ResultLine:
    """Result line of a comparison: adaptation must lie well between the static plans, and gain by several variants."""
    adaptive, lightest, heaviest = stats[ADAPTIVE], stats[LIGHTEST], stats[HEAVIEST]
    between = heaviest.measured_accuracy - lightest.measured_accuracy
    gained = adaptive.measured_accuracy - lightest.measured_accuracy
    share = gained / between if between > 0 else math.nan
    values: dict[str, float | int | str | None] = {}
    for title, run in stats.items():
        name = title.removeprefix("static-").replace("-", "_")
        values |= {f"{name}_{figure}": value for figure, value in run.figures().items()}
    bars = (
        *accounting(adaptive),
        threshold("share of the accuracy between lightest and heaviest", share, ">=", 0.5),
        threshold("adaptive: fraction within the SLO", adaptive.slo_fraction, ">=", 0.98),
        threshold("heaviest: fraction within the SLO", heaviest.slo_fraction, "<=", 0.9),
        threshold("adaptive: |measured - expected| accuracy", adaptive.accuracy_gap, "<=", 0.02),
        *(_gain(adaptive, stats[SINGLE]) if SINGLE in stats else ()),
    )
    return ResultLine(name="compare", figures=values, bars=bars)


def _gain(adaptive: RunStats, single: RunStats) -> tuple[Threshold, ...]:
    """Thresholds of what several variants at once gain: fewer cores at equal accuracy, else more accuracy."""
    gained = adaptive.measured_accuracy - single.measured_accuracy
    share, equal = adaptive.mean_cores / single.mean_cores, abs(gained) <= EQUAL_ACCURACY
    missed = 1.0 - adaptive.outcomes.get("ok", 0) / adaptive.received
    return (
        *(() if equal else (threshold("accuracy gained over the best single variants", gained, ">=", 0.015),)),
        threshold("mean cores / those of the best single variants", share, "<=", 0.65 if equal else 1.0),
        threshold("adaptive: fraction late, dropped or refused", missed, "<=", 0.0005),
    )
