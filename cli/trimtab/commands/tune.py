"""`trimtab tune`: searches operating points of a vision transformer on this machine."""

from typing import Annotated

import typer

from trimtab.options import (
    SAMPLES_METAVAR,
    EditedPipelineOption,
    MaxSamplesOption,
    PipelineArgument,
    SeedOption,
    console,
    terminal_table,
)
from trimtab.preflight import counting_progress, prepare, write_edited
from trimtab.tuning.target import tuning_target, with_points
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_pipelines.accuracy_evidence import AGREEMENT
from trimtab_pipelines.documents import pipeline_file, pipeline_folder
from trimtab_pipelines.result_line import ResultLine
from trimtab_pipelines.stages import Stage

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
    from trimtab.tuning.measurement import TimeBudget  # noqa: PLC0415  (imports torch)
    from trimtab.tuning.search import Search, SearchSpace  # noqa: PLC0415

    budget, document = TimeBudget(seconds), prepare(pipeline)
    target, home = tuning_target(document, stage_name, variant_name), pipeline_folder(pipeline)
    stage, variant = target.spec.stages[0], target.spec.stages[0].variants[0]
    space, source = SearchSpace.of(target, home), LabelledPayloads(target, samples, seed, labels="Optional")
    search = Search(target, home, source, min(max_samples or len(source), len(source)), floor)
    console.print(
        f"{len(space.points)} candidates of {variant.name}, {search.count} of {len(source)} samples, batch sizes "
        f"{', '.join(map(str, search.batches))}"
    )
    if not source.labelled:
        console.print(_unlabelled_message(document.spec.stage(stage.name), variant.name))
    with counting_progress() as progress:
        total = len(search.batches) * 6 + len(space.points) + EXPECTED_COMPILED
        bar = progress.add_task("starting", total=total)
        result = search.run(space, budget, lambda text: progress.update(bar, advance=1, description=text))
    console.print(terminal_table(result.columns, result.rows(seconds)))
    for message in result.exclusions():
        console.print(message, markup=False)
    text = pipeline_file(pipeline).read_text()
    write_edited(out or pipeline_file(pipeline), with_points(text, stage.name, variant.name, result.selection.selected))
    ResultLine(name="tune", figures=result.figures()).print()
    return 0


def _unlabelled_message(stage: Stage, variant: str) -> str:
    others = [other.name for other in stage.variants if other.name != variant]
    comparison = f"; plans compare it with the accuracies of {', '.join(others)}" if others else ""
    return f"no labels: points are evaluated by {AGREEMENT}, which is not an accuracy{comparison}"
