"""`trimtab compare`: adaptation against plans of one variant a stage, and against the lightest and heaviest variants.

All serve the same load on the same cores.
"""

import math
from collections.abc import Callable, Mapping

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
from trimtab_profiler.identity import usable_cores

CLIMBING_SEED = 1
"""Seed of the bundled load with which it rises through every rate once and falls through most of them."""
ADAPTIVE, SINGLE, CHEAPEST = "adaptive", "best-single-variants", "cheapest"
"""`SINGLE` adapts too, with plans of one variant a stage; `CHEAPEST` with the fewest cores for more accuracy."""
LIGHTEST, HEAVIEST = "static-lightest", "static-heaviest"
EXTRA_ACCURACY, EQUAL_ACCURACY = 0.005, 0.003
"""What the cheapest plans add to the planned accuracy of `SINGLE`, and a difference that counts as none."""


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
            changing_load(document, profiles_by_stage, usable_cores()).spec(CLIMBING_SEED),
            duration_seconds=load.duration_seconds or DEMO_SECONDS,
            seed=load.seed,
            protocol=client,
            samples=absolute_samples(load.samples),
        )
    console.print(f"load {options.spec().text}")
    peak_rps = float(options.spec().rates(options.duration_seconds).max())
    single, runs = with_single_variants(document), dict[str, Run]()
    setups: dict[str, Callable[[], tuple[InferencePipeline, PipelinePlan | None]]] = {
        ADAPTIVE: lambda: (document, None),
        SINGLE: lambda: (single, None),
        CHEAPEST: lambda: (_cheapest(document, run_stats(runs[SINGLE]).expected_accuracy), None),
        LIGHTEST: lambda: (document, static_plan(document, profiles_by_stage, "lightest", peak_rps)),
        HEAVIEST: lambda: (document, static_plan(document, profiles_by_stage, "heaviest", peak_rps)),
    }
    if single.spec.policy_name == document.spec.policy_name:
        del setups[SINGLE], setups[CHEAPEST]
    for title, setup_of in setups.items():
        console.print(title, style="bold")
        served, plan = setup_of()
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


def _cheapest(pipeline: InferencePipeline, accuracy: float) -> InferencePipeline:
    """The pipeline with the fewest cores for an accuracy; the most accurate plans if nothing was served."""
    goal = {"goal": "MinCost", "accuracy_metric": "Product", "accuracy_floor": min(accuracy + EXTRA_ACCURACY, 1.0)}
    objective = pipeline.spec.objective.replace(**({} if math.isnan(accuracy) else goal))
    return pipeline.with_spec(objective=objective)


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
        *(_gain(adaptive, stats[CHEAPEST], stats[SINGLE]) if SINGLE in stats else ()),
    )
    return ResultLine(name="compare", figures=values, bars=bars)


def _gain(adaptive: RunStats, cheapest: RunStats, single: RunStats) -> tuple[Threshold, ...]:
    """Thresholds of what several variants at once gain: more accuracy for the cores, or fewer cores for the accuracy.

    One gain of one run is enough; if all are missed, the thresholds of each run are returned. What `adaptive` misses
    always counts.
    """
    missed = _missed(ADAPTIVE, adaptive)
    more = _compared_gain(ADAPTIVE, adaptive, single, min_accuracy=0.015, max_cores=1.0)
    if all(bar.holds for bar in more):
        return (*more, missed)
    least = [
        _compared_gain(CHEAPEST, cheapest, single, min_accuracy=accuracy, max_cores=cores)
        for accuracy, cores in ((0.015, 1.0), (-EQUAL_ACCURACY, 0.65))
    ]
    held = next((gain for gain in least if all(bar.holds for bar in gain)), (*more, *least[-1]))
    return (*held, missed, _missed(CHEAPEST, cheapest))


def _compared_gain(
    title: str, run: RunStats, single: RunStats, *, min_accuracy: float, max_cores: float
) -> tuple[Threshold, Threshold]:
    gained = run.measured_accuracy - single.measured_accuracy
    cores = run.mean_cores / single.mean_cores
    return (
        threshold(f"{title}: accuracy above the best single variants", gained, ">=", min_accuracy),
        threshold(f"{title}: mean cores / those of the best single variants", cores, "<=", max_cores),
    )


def _missed(title: str, run: RunStats) -> Threshold:
    share = 1.0 - run.outcomes.get("ok", 0) / run.received
    return threshold(f"{title}: fraction late, dropped or refused", share, "<=", 0.0005)
