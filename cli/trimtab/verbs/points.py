"""`trimtab points`: try forms of a vision transformer here, on a user's samples; write those worth keeping."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from trimtab.decisions import terminal_table
from trimtab.options import PipelineArgument, SeedOption, console
from trimtab.points.budget import Budget
from trimtab.points.choice import Choice, Trial, choose, figure_of
from trimtab.points.forms import FULL, forms
from trimtab.points.precisions import Machine, saves_nothing, untried, worth_trying
from trimtab.points.subject import subject_of
from trimtab.points.writing import with_points
from trimtab.preparation import prepare
from trimtab_loadtester.labelled import LabelledPayloads
from trimtab_pipelines.documents import load_pipeline, write_atomically
from trimtab_pipelines.evidence import AGREEMENT
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.verdict import Outcome
from trimtab_profiler.hardware import instructions

LARGEST_BATCH = 16
COLUMNS = ("95 % interval", "ms a row", "times as fast", "")


def command(
    pipeline: PipelineArgument,
    samples: Annotated[
        str,
        typer.Option("--samples", metavar="DIR|module:Class", help="Your samples, best with their right answers"),
    ],
    stage_name: Annotated[
        str | None,
        typer.Option("--stage", metavar="STAGE", help="Of several stages, which; samples are then of its own inputs"),
    ] = None,
    variant_name: Annotated[
        str | None, typer.Option("--variant", metavar="VARIANT", help="Of several variants of the stage, which")
    ] = None,
    floor: Annotated[
        float, typer.Option("--floor", min=0.0, max=1.0, help="Share of the model's accuracy that points must keep")
    ] = 0.95,
    most: Annotated[int | None, typer.Option("--most", min=1, help="Use so many samples at most")] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.0, help="Stop after about so long, and keep the best found by then")
    ] = 480.0,
    seed: SeedOption = 0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the pipeline here; default: where it stands")
    ] = None,
) -> int:
    """Find operating points for a vision transformer: how many tokens to merge, by which rule, in which precision.

    Each form is timed beside the model as it is and judged on your samples. Without right answers it is judged by how
    often it answers as the model as it is, which is written and shown as agreement. Kept is what no other beats, in
    steps of five per cent or more; why each other form is not kept is told. Those that nobody had time to judge are
    told too.
    """
    from trimtab.points.bench import Bench  # noqa: PLC0415  (imports torch)
    from trimtab.points.trials import tried  # noqa: PLC0415
    from trimtab_model_servers.tokens.rules import RULES  # noqa: PLC0415

    budget, whole = Budget(seconds), prepare(pipeline)
    document = subject_of(whole, stage_name, variant_name)
    file = pipeline / "pipeline.yaml" if pipeline.is_dir() else pipeline
    stage = document.spec.stages[0]
    variant = stage.variants[0]
    home = file.resolve().parent
    first = Bench(document, home, [FULL])
    machine = Machine(first.gpu, instructions())
    points = forms(*first.layers, list(RULES), worth_trying(machine))
    source = LabelledPayloads(document, samples, seed, labels="Optional")
    count = min(most or len(source), len(source))
    batches = sorted({1, *(size for size in stage.batch_sizes if size <= min(LARGEST_BATCH, count))})
    console.print(f"{len(points)} forms of {variant.name}, {count} samples of {len(source)}, batches {batches}")
    for precision, why in untried(machine).items():
        console.print(f"{precision} is {why}")
    if not source.labelled:
        console.print(_unlabelled(whole.spec.stage(stage.name), variant.name))
    steps = len(batches) * 6 + len(points)
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total} {task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as shown:
        bar = shown.add_task("starting", total=steps)
        bench = Bench(document, home, points)
        found = tried(
            bench, source, count, batches, lambda words: shown.update(bar, advance=1, description=words), budget
        )
    trials, choice = found.trials, choose(found.trials, floor)
    out_of_time = dict.fromkeys(found.unjudged, f"not judged: the {seconds:g} seconds were over (--seconds)")
    left = [
        (name, "", "", f"{1000 * found.row_seconds[name]:.2f}", f"{_speed_up(found.row_seconds, name):.2f}", why)
        for name, why in (*found.slow.items(), *out_of_time.items())
    ]
    named = figure_of(trials[0].accuracy)
    rows = [*(_row(trial, found.row_seconds, choice) for trial in trials), *left]
    console.print(terminal_table(("point", named, *COLUMNS), rows))
    for precision, ratio in found.slow_precisions.items():
        console.print(f"no form in {precision} is kept: {saves_nothing(precision, ratio, machine)}")
    written = out or file
    write_atomically(written, with_points(file.read_text(), stage.name, variant.name, choice.kept))
    load_pipeline(written)  # what was written can be read
    console.print(f"written to {written}")
    figures = {f"{trial.point.name}_{named}": trial.accuracy.value for trial in choice.kept}
    names = [trial.point.name for trial in choice.kept]
    speeds = {f"{name}_speed_up": round(_speed_up(found.row_seconds, name), 3) for name in names}
    known = len(trials) + len(found.slow) + len(found.slow_precisions)
    tally = {"tried": known, "unjudged": len(out_of_time), "untimed": len(points) - known - len(out_of_time)}
    tally |= {"kept": len(choice.kept), "samples": count}
    Outcome(name="points", figures=tally | figures | speeds).print()
    return 0


def _unlabelled(stage: Stage, variant: str) -> str:
    """What is told instead of accuracies, and what that is not fit for."""
    others = [other.name for other in stage.variants if other.name != variant]
    beside = f"; plans will hold it against the accuracies of {', '.join(others)}" if others else ""
    return f"no right answers: forms are judged by {AGREEMENT}, which is no accuracy{beside}"


def _speed_up(row_seconds: Mapping[str, float], name: str) -> float:
    return row_seconds[FULL.name] / row_seconds[name]


def _row(trial: Trial, row_seconds: Mapping[str, float], choice: Choice) -> tuple[str, ...]:
    accuracy = trial.accuracy
    return (
        trial.point.name,
        f"{accuracy.value:.4f}",
        f"{accuracy.low:.4f} – {accuracy.high:.4f}",
        f"{1000 * trial.row_seconds:.2f}",
        f"{_speed_up(row_seconds, trial.point.name):.2f}",
        choice.refused.get(trial.point.name, "kept"),
    )
