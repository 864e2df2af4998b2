"""`trimtab tune`: searches operating points of a vision transformer on this machine."""

from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from trimtab.options import (
    SAMPLES_METAVAR,
    EditedPipelineOption,
    MaxSamplesOption,
    PipelineArgument,
    SeedOption,
    console,
)
from trimtab.plan_view import terminal_table
from trimtab.preflight import prepare
from trimtab.tuning.pipeline_edit import with_points
from trimtab.tuning.target import tuning_target
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_pipelines.documents import load_pipeline, write_atomically
from trimtab_pipelines.result_line import ResultLine

EXPECTED_COMPILED = 6
"""Number of compiled points that the progress bar assumes."""


def command(
    pipeline: PipelineArgument,
    samples: Annotated[
        str, typer.Option("--samples", metavar=SAMPLES_METAVAR, help="Samples, preferably with their labels")
    ],
    stage_name: Annotated[
        str | None,
        typer.Option("--stage", metavar="STAGE", help="Stage, if there are several; samples are of its own inputs"),
    ] = None,
    variant_name: Annotated[
        str | None, typer.Option("--variant", metavar="VARIANT", help="Variant, if the stage has several")
    ] = None,
    floor: Annotated[
        float, typer.Option("--floor", min=0.0, max=1.0, help="Share of the model's accuracy that points must reach")
    ] = 0.95,
    max_samples: MaxSamplesOption = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.0, help="Time limit; the best points found by then are written")
    ] = 480.0,
    seed: SeedOption = 0,
    out: EditedPipelineOption = None,
) -> int:
    """Find operating points of a vision transformer: token merging rates, merge rules and precisions.

    Each candidate is timed alongside the full model and evaluated on the samples. Without labels it is evaluated by
    its agreement with the full model. Points that no other dominates are selected, in steps of at least five per cent
    of time, and are also tried in compiled form if a compiler is installed. The table states why a candidate is
    rejected. A stage with a confidence output also gets mean confidences; samples that name their tasks, accuracies by
    task.
    """
    from trimtab.tuning import tables  # noqa: PLC0415  (imports torch)
    from trimtab.tuning.search import Search, search_context  # noqa: PLC0415
    from trimtab.tuning.timing import TimeBudget  # noqa: PLC0415

    budget, document = TimeBudget(seconds), prepare(pipeline)
    target = tuning_target(document, stage_name, variant_name)
    stage, file = target.spec.stages[0], pipeline / "pipeline.yaml" if pipeline.is_dir() else pipeline
    variant, home = stage.variants[0], file.resolve().parent
    context, source = search_context(target, home), LabelledPayloads(target, samples, seed, labels="Optional")
    search = Search(target, home, source, min(max_samples or len(source), len(source)), floor)
    console.print(
        f"{len(context.points)} candidates of {variant.name}, {search.count} of {len(source)} samples, batch sizes "
        f"{', '.join(map(str, search.batches))}"
    )
    if not source.labelled:
        console.print(tables.unlabelled_message(document.spec.stage(stage.name), variant.name))
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total} {task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        total = len(search.batches) * 6 + len(context.points) + EXPECTED_COMPILED
        bar = progress.add_task("starting", total=total)
        result = search.run(context, budget, lambda text: progress.update(bar, advance=1, description=text))
    console.print(terminal_table(tables.table_columns(result), [*tables.table_rows(result, seconds)]))
    for message in tables.exclusion_messages(context, result):
        console.print(message, markup=False)
    path = out or file
    write_atomically(path, with_points(file.read_text(), stage.name, variant.name, result.selection.selected))
    load_pipeline(path)  # raises DocumentError if the result cannot be read
    console.print(f"pipeline written to {path}")
    ResultLine(name="tune", figures=tables.result_figures(context, result)).print()
    return 0
