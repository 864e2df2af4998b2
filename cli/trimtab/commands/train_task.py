"""`trimtab train-task`: trains a new task for a vision transformer on labelled images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.progress import BarColumn, Progress, TextColumn

from trimtab.options import SAMPLES_METAVAR, PipelineArgument, SeedOption, console, terminal_table
from trimtab.preflight import prepare
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_pipelines.documents import pipeline_folder
from trimtab_pipelines.model_spec import model_spec
from trimtab_pipelines.quantity import parse_duration
from trimtab_pipelines.result_line import ResultLine
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.tasks import TaskTerms
from trimtab_pipelines.variants import Variant
from trimtab_pipelines.yaml_edit import flow_accuracy

COLUMNS = ("point", "accuracy", "95 % interval", "images")


def command(
    pipeline: PipelineArgument,
    task: Annotated[str, typer.Argument(help="Name of the new task")],
    samples: Annotated[
        str, typer.Option("--samples", metavar=SAMPLES_METAVAR, help="Images with their labels: 0, 1, 2 and so on")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Path of the task's file (.safetensors)")],
    variant: Annotated[str | None, typer.Option("--variant", help="Variant, if there are several")] = None,
    max_images: Annotated[int | None, typer.Option("--max", min=8, help="Maximum number of images")] = None,
    utility: Annotated[float, typer.Option("--utility", min=0.0, help="Utility of an answer in time")] = 1.0,
    latency: Annotated[str | None, typer.Option("--latency", help="Latency SLO of its requests, such as 150ms")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps for each prompt variant")] = 300,
    seed: SeedOption = 0,
) -> int:
    """Train a new task for a vision transformer: a head and prompts for each of its operating points.

    The transformer and its other tasks do not change. A quarter of the images is held out to evaluate the task at every
    operating point. List the file in the variant's `tasks`, or register it at a running router.
    """
    import torch  # noqa: PLC0415  (slow to import)

    from trimtab.task_training import TaskTraining  # noqa: PLC0415
    from trimtab_training.task_training import LabelledImages, task_schedule  # noqa: PLC0415

    document = prepare(pipeline)
    terms = TaskTerms(utility=utility, latency_seconds=parse_duration(latency) if latency else None)
    stage, transformer = _find_variant(document, variant)
    source = LabelledPayloads(image_classification(document), samples, seed)
    pixels, labels = read_images(source, max_images)
    with Progress(TextColumn("{task.description}"), BarColumn(), console=console) as progress:
        bar = progress.add_task("training", total=1)
        spec = model_spec(document, pipeline_folder(pipeline), stage, transformer, transformer.resources.cpu)
        training = TaskTraining(spec, task_schedule(steps, seed), lambda share: progress.update(bar, completed=share))
        images = LabelledImages(torch.from_numpy(pixels), torch.from_numpy(labels))
        report = training.train(task, images, terms, out, source.digest())
    for prompt_variant in report.excluded:
        console.print(f"not trained: {prompt_variant}; the task's file has no room for so many classes", markup=False)
    _print_report(task, out, report.accuracy_by_point)
    return 0


def _print_report(task: str, out: Path, accuracies: Mapping[str, Accuracy]) -> None:
    rows = []
    for point, accuracy in accuracies.items():
        interval = f"{accuracy.low:.4f} – {accuracy.high:.4f}"
        rows.append((point, f"{accuracy.value:.4f}", interval, str(accuracy.samples)))
        line = f"{point}: accuracyByTask: {task}: {flow_accuracy(accuracy)}"
        console.print(line, markup=False, soft_wrap=True)
    console.print(terminal_table(COLUMNS, rows, f"{task}, on images held out"))
    console.print(f"task written to {out}")
    held_out = next(iter(accuracies.values())).samples
    figures = {f"{point}_accuracy": accuracy.value for point, accuracy in accuracies.items()}
    ResultLine(name="train-task", figures={"task": task, "held_out": held_out} | figures).print()


def _find_variant(document: InferencePipeline, name: str | None) -> tuple[Stage, Variant]:
    """Find the vision transformer of that name, or the only one, and its stage."""
    transformers = [
        (stage, variant)
        for stage in document.spec.stages
        for variant in stage.variants
        if variant.family == "vision-transformer"
    ]
    matches = [(stage, variant) for stage, variant in transformers if name in {None, variant.name}]
    if len(matches) != 1:
        names = ", ".join(variant.name for _, variant in transformers) or "none"
        raise ValueError(f"choose one vision transformer by --variant; the pipeline has: {names}")
    return matches[0]


def image_classification(document: InferencePipeline) -> InferencePipeline:
    """Reduce the pipeline to the input `image` and the output `label`, since the samples are of one task."""
    spec = document.spec
    images = tuple(tensor for tensor in spec.inputs if tensor.name == "image")
    labels = tuple(tensor for tensor in spec.outputs if tensor.name == "label")
    if not images or not labels:
        raise ValueError("the pipeline must have an input `image` and an output `label`")
    return document.with_spec(inputs=images, outputs=labels)


def read_images(source: LabelledPayloads, max_images: int | None) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return images [n, channels, side, side] and labels [n], in the samples' order."""
    payloads = [source.payload(index) for index in range(min(max_images or len(source), len(source)))]
    pixels = np.concatenate([payload.inputs[0].array for payload in payloads])
    return pixels, np.array([_label(payload.truth) for payload in payloads], np.int64)


def _label(truth: object) -> int:
    value = next(iter(truth.values())) if isinstance(truth, dict) else truth
    if not isinstance(value, int | np.integer):
        raise ValueError(f"label {value!r} is not a whole number")
    return int(value)
