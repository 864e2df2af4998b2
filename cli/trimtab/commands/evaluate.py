"""`trimtab evaluate`: measure every variant and operating point on a user's own samples, and write it down."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from trimtab.accuracy.attribution import PointKey, Tally, accuracies, mean_confidences
from trimtab.accuracy.escalation import escalations
from trimtab.accuracy.evaluate import Evaluation, evaluate
from trimtab.accuracy.per_task import task_accuracies, task_accuracy_stages
from trimtab.options import PipelineArgument, SeedOption, console
from trimtab.plan_view import terminal_table
from trimtab.preflight import prepare
from trimtab.run_folder import RunFolder
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_pipelines.documents import load_pipeline, write_atomically
from trimtab_pipelines.result_line import ResultLine
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.yaml_edit import with_accuracies, with_escalations

COLUMNS = ("stage", "variant", "point", "task", "before", "measured", "95 % interval", "certain")


def command(
    pipeline: PipelineArgument,
    samples: Annotated[
        str, typer.Option("--samples", metavar="DIR|module:Class", help="Your own samples, with their right answers")
    ],
    most: Annotated[int | None, typer.Option("--most", min=1, help="Use so many samples at most")] = None,
    seed: SeedOption = 0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the pipeline here; default: where it stands")
    ] = None,
) -> int:
    """Measure the accuracy of every variant and operating point on your own samples; write it into the pipeline.

    A stage that says how certain it is has its mean confidence written beside: drifts are told by how that changes.
    Where samples tell their tasks, accuracies on each are written, with the mean confidence on each.
    Of a pipeline of several stages, each variant is tried with the best of the other stages. A single stage that says
    how certain it is gets second looks too: what it is worth to ask a more accurate point about the least certain rows.
    """
    document = prepare(pipeline)
    source = LabelledPayloads(document, samples, seed)
    file = pipeline / "pipeline.yaml" if pipeline.is_dir() else pipeline
    count = min(most or len(source), len(source))
    tasks = source.tasks(count)
    of_tasks = f" of {len(tasks)} tasks" if tasks else ""
    console.print(f"{count} samples{of_tasks} of {len(source)}, {_points(document)} operating points")
    digest = source.digest()
    order = Evaluation(document, file.resolve().parent, source, count)
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total} {task.description}"), TimeRemainingColumn())
    with RunFolder() as folder, Progress(*columns, console=console) as shown:
        bar = shown.add_task("starting", total=None)

        def show(of: int, words: str) -> None:
            shown.update(bar, total=of * count, advance=1, description=words)

        heard = asyncio.run(evaluate(order, folder, show))
    tallies = {choice: Tally.of([one.score for one in found]) for choice, found in heard.items()}
    apart = task_accuracy_stages(document) if tasks else ()
    confidences = {choice: mean_confidences(found, apart) for choice, found in heard.items()}
    measured, again = accuracies(document, tallies, digest, confidences), escalations(document, heard)
    by_task = task_accuracies(document, heard, tasks, digest)
    rows = [
        _row(document, place, task, one)
        for place, found in measured.items()
        for task, one in (("", found), *by_task.get(place, {}).items())
    ]
    console.print(terminal_table(COLUMNS, rows))
    written = out or file
    write_atomically(written, with_escalations(with_accuracies(file.read_text(), measured, by_task), again))
    load_pipeline(written)  # what was written can be read
    for (_, variant, point), found in again.items():
        if found:
            best = found[-1]
            console.print(
                f"{variant} {point}: {len(found)} second looks, up to {best.accuracy:.4f} "
                f"with {best.share:.0%} of the samples again at {best.to}"
            )
    console.print(f"written to {written}")
    figures: dict[str, float | int | str | None] = {
        f"accuracy_{'_'.join(place)}": found.value for place, found in measured.items()
    }
    figures |= {
        f"accuracy_{'_'.join(place)}_{task}": one.value for place, on in by_task.items() for task, one in on.items()
    }
    figures |= {f"second_looks_{'_'.join(place)}": len(found) for place, found in again.items()}
    ResultLine(name="accuracy", figures={"samples": count, "samples_digest": digest, **figures}).print()
    return 0


def _points(pipeline: InferencePipeline) -> int:
    return sum(len(variant.points) for stage in pipeline.spec.stages for variant in stage.variants)


def _row(pipeline: InferencePipeline, place: PointKey, task: str, found: Accuracy) -> tuple[str, ...]:
    stage, variant, point = place
    known = pipeline.spec.stage(stage).variant(variant).point(point)
    before = known.accuracy_by_task.get(task) if task else known.measured_accuracy()
    was = "" if before is None else f"{before.value:.4f} {before.evidence_label}"
    certain = "" if found.mean_confidence is None else f"{found.mean_confidence:.4f}"
    interval = f"{found.low:.4f} – {found.high:.4f}"
    return stage, variant, point, task or "all", was, f"{found.value:.4f}", interval, certain
