"""`trimtab points`: try forms of a vision transformer here, on a user's samples; write those worth keeping."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
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
from trimtab_model_servers.processor import instructions
from trimtab_pipelines.documents import load_pipeline, write_atomically
from trimtab_pipelines.evidence import AGREEMENT
from trimtab_pipelines.operating_point import Precision
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.verdict import Outcome

LARGEST_BATCH = 16
MOST_COMPILED = 6
"""Points that progress counts with; there may be fewer or more."""
JUDGING_SHARE = 0.75
"""Of the time there is, what may pass before the points that are kept by then are compiled."""
COLUMNS = ("95 % interval", "certain", "ms a row", "times as fast", "")


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
    steps of five per cent or more; that is tried compiled too, where there is a compiler. Why each other form is not
    kept is told. Those that nobody had time to judge are told too. Of a stage that says how certain it is, mean
    certainties are written too; of samples that tell tasks, by task.
    """
    from trimtab.points.bench import Bench  # noqa: PLC0415  (imports torch)
    from trimtab.points.compiling import compiled, why_none  # noqa: PLC0415
    from trimtab.points.judging import Judge  # noqa: PLC0415
    from trimtab.points.timing import Timer  # noqa: PLC0415
    from trimtab.points.trials import tried  # noqa: PLC0415
    from trimtab_model_servers.tokens.rules import RULES  # noqa: PLC0415

    budget, whole = Budget(seconds), prepare(pipeline)
    document = subject_of(whole, stage_name, variant_name)
    file = pipeline / "pipeline.yaml" if pipeline.is_dir() else pipeline
    stage = document.spec.stages[0]
    variant = stage.variants[0]
    home = file.resolve().parent
    first = Bench(document, home, [FULL])
    machine, uncompiled = Machine(first.gpu, instructions()), why_none(first)
    points = forms(*first.layers, list(RULES), worth_trying(machine))
    del first  # its model would stay in memory beside the one that is tried
    source = LabelledPayloads(document, samples, seed, labels="Optional")
    count = min(most or len(source), len(source))
    batches = sorted({1, *(size for size in stage.batch_sizes if size <= min(LARGEST_BATCH, count))})
    console.print(f"{len(points)} forms of {variant.name}, {count} samples of {len(source)}, batches {batches}")
    if not source.labelled:
        console.print(_unlabelled(whole.spec.stage(stage.name), variant.name))
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total} {task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as shown, TemporaryDirectory(prefix="trimtab-forms-") as workshop:
        bar = shown.add_task("starting", total=len(batches) * 6 + len(points) + MOST_COMPILED)
        bench, largest = Bench(document, home, points), [source.payload(index) for index in range(max(batches))]
        timer = Timer(bench, largest, lambda words: shown.update(bar, advance=1, description=words), budget)
        judge = Judge(bench, source, count, max(batches))
        found = tried(bench, judge, timer, batches, 1.0 if uncompiled else JUDGING_SHARE)
        kept = () if uncompiled else choose(found.trials, floor).kept
        compilations = compiled(bench, kept, judge, timer, batches, Path(workshop))
        trials = [*found.trials, *compilations.trials]
        choice = choose(trials, floor)
        bench.keep_forms([trial.point for trial in choice.kept], Path(workshop))
    row_seconds = {**found.row_seconds, **{trial.point.name: trial.row_seconds for trial in compilations.trials}}
    out_of_time = dict.fromkeys(found.unjudged, f"not judged in time; --seconds is {seconds:g}")
    left = [
        (name, "", "", "", f"{1000 * row_seconds[name]:.2f}", f"{_speed_up(row_seconds, name):.2f}", why)
        for name, why in (*found.slow.items(), *out_of_time.items())
    ]
    named = figure_of(trials[0].accuracy)
    rows = [*(_row(trial, row_seconds, choice) for trial in trials), *left]
    console.print(terminal_table(("point", named, *COLUMNS), rows))
    for words in _left_out(machine, found.slow_precisions, compilations.refused, uncompiled):
        console.print(words, markup=False)
    written = out or file
    write_atomically(written, with_points(file.read_text(), stage.name, variant.name, choice.kept))
    load_pipeline(written)  # what was written can be read
    console.print(f"written to {written}")
    known = len(found.trials) + len(found.slow) + len(found.slow_precisions)
    tally = {"tried": known, "unjudged": len(out_of_time), "untimed": len(points) - known - len(out_of_time)}
    tally |= {"compiled": len(compilations.trials), "kept": len(choice.kept), "samples": count}
    Outcome(name="points", figures=tally | _figures(choice.kept, row_seconds, named)).print()
    return 0


def _figures(kept: Sequence[Trial], row_seconds: Mapping[str, float], named: str) -> dict[str, float]:
    """How good and how fast each point is that is kept."""
    good = {f"{trial.point.name}_{named}": trial.accuracy.value for trial in kept}
    names = [trial.point.name for trial in kept]
    return good | {f"{name}_speed_up": round(_speed_up(row_seconds, name), 3) for name in names}


def _left_out(
    machine: Machine, slow: Mapping[Precision, float], uncompiled: Mapping[str, str], none_compiled: str
) -> Iterator[str]:
    """Say why there are no points in a precision, or compiled."""
    for precision, why in untried(machine).items():
        yield f"{precision} is {why}"
    for precision, ratio in slow.items():
        yield f"no point in {precision} is kept: {saves_nothing(precision, ratio, machine)}"
    for name, why in uncompiled.items():
        yield f"{name} is not compiled: {why}"
    if none_compiled:
        yield f"no point is compiled: {none_compiled}"


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
        "" if accuracy.mean_certainty is None else f"{accuracy.mean_certainty:.4f}",
        f"{1000 * trial.row_seconds:.2f}",
        f"{_speed_up(row_seconds, trial.point.name):.2f}",
        choice.refused.get(trial.point.name, "kept"),
    )
