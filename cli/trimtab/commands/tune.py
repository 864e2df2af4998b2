"""`trimtab tune`: try forms of a vision transformer here, on a user's samples; write those worth keeping."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from trimtab.options import PipelineArgument, SeedOption, console
from trimtab.plan_view import terminal_table
from trimtab.preflight import prepare
from trimtab.tuning.budget import TimeBudget
from trimtab.tuning.pipeline_edit import with_points
from trimtab.tuning.target import tuning_target
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_pipelines.documents import load_pipeline, write_atomically
from trimtab_pipelines.result_line import ResultLine

EXPECTED_COMPILED = 6
"""Points that progress counts with; there may be fewer or more."""


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
    confidences are written too; of samples that tell tasks, by task.
    """
    from trimtab.tuning import tables  # noqa: PLC0415  (imports torch)
    from trimtab.tuning.search import Search, search_context  # noqa: PLC0415

    budget, whole = TimeBudget(seconds), prepare(pipeline)
    document = tuning_target(whole, stage_name, variant_name)
    stage, file = document.spec.stages[0], pipeline / "pipeline.yaml" if pipeline.is_dir() else pipeline
    variant, home = stage.variants[0], file.resolve().parent
    here, source = search_context(document, home), LabelledPayloads(document, samples, seed, labels="Optional")
    search = Search(document, home, source, min(most or len(source), len(source)), floor)
    console.print(
        f"{len(here.points)} forms of {variant.name}, {search.count} samples of {len(source)}, batches {search.batches}"
    )
    if not source.labelled:
        console.print(tables.unlabelled(whole.spec.stage(stage.name), variant.name))
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total} {task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as shown:
        bar = shown.add_task("starting", total=len(search.batches) * 6 + len(here.points) + EXPECTED_COMPILED)
        found = search.run(here, budget, lambda words: shown.update(bar, advance=1, description=words))
    console.print(terminal_table(tables.table_columns(found), [*tables.rows(found, seconds)]))
    for words in tables.excluded(here, found):
        console.print(words, markup=False)
    written = out or file
    write_atomically(written, with_points(file.read_text(), stage.name, variant.name, found.choice.kept))
    load_pipeline(written)  # what was written can be read
    console.print(f"written to {written}")
    ResultLine(name="points", figures=tables.figures(here, found)).print()
    return 0
