"""`trimtab train-task`: a new task for a vision transformer that serves others, from a user's labelled images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.progress import BarColumn, Progress, TextColumn

from trimtab.options import PipelineArgument, SeedOption, console
from trimtab.plan_view import terminal_table
from trimtab.preflight import prepare
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_pipelines.accuracy_evidence import Accuracy
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
        str, typer.Option("--samples", metavar="DIR|module:Class", help="Images with their labels, 0, 1, 2 and so on")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the task's file here (.safetensors)")],
    variant: Annotated[str | None, typer.Option("--variant", help="Whose weights; default: the only one's")] = None,
    most: Annotated[int | None, typer.Option("--most", min=8, help="Use so many images at most")] = None,
    utility: Annotated[float, typer.Option("--utility", min=0.0, help="Worth of its answers in time")] = 1.0,
    latency: Annotated[str | None, typer.Option("--latency", help="Deadline of its requests, such as 150ms")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Of training, for each way the model runs")] = 300,
    seed: SeedOption = 0,
) -> int:
    """Train a new task for a vision transformer: a head, and prompts, for every way that its points run.

    The transformer and its other tasks stay as they are. A quarter of the images is held out; on these the task is
    judged at every operating point. The file is named among the variant's `tasks`, or registered at a router that runs.
    """
    import torch  # noqa: PLC0415  (slow to import)

    from trimtab.task_training import TaskTraining  # noqa: PLC0415
    from trimtab_training.prompt_tuning import Labelled, TrainingSchedule  # noqa: PLC0415

    document = prepare(pipeline)
    granted = TaskTerms(utility=utility, latency_seconds=parse_duration(latency) if latency else None)
    stage, chosen = _variant(document, variant)
    source = LabelledPayloads(_images_alone(document), samples, seed)
    found = _read(source, most)
    with Progress(TextColumn("{task.description}"), BarColumn(), console=console) as shown:
        bar = shown.add_task("training", total=1)
        home = pipeline if pipeline.is_dir() else pipeline.parent
        served = model_spec(document, home, stage, chosen, chosen.resources.cpu)
        joining = TaskTraining(
            served, TrainingSchedule(steps=steps, seed=seed), lambda share: shown.update(bar, completed=share)
        )
        made = joining.train(task, Labelled(*map(torch.from_numpy, found)), granted, out, source.digest())
    for way in made.left_out:
        console.print(f"not trained: {way}; a task's file has no room for so many classes in every way", markup=False)
    _tell(task, out, made.accuracy_by_point)
    return 0


def _tell(task: str, out: Path, judged: Mapping[str, Accuracy]) -> None:
    rows = []
    for name, one in judged.items():
        rows.append((name, f"{one.value:.4f}", f"{one.low:.4f} – {one.high:.4f}", str(one.samples)))
        console.print(f"{name}: accuracyByTask: {task}: {flow_accuracy(one)}", markup=False, soft_wrap=True)
    console.print(terminal_table(COLUMNS, rows, f"{task}, on images held out"))
    console.print(f"the task: {out}")
    held_out = next(iter(judged.values())).samples
    figures = {f"{name}_accuracy": one.value for name, one in judged.items()}
    ResultLine(name="train-task", figures={"task": task, "held_out": held_out} | figures).print()


def _variant(document: InferencePipeline, name: str | None) -> tuple[Stage, Variant]:
    """The variant of that name, or the only vision transformer there is, and its stage."""
    stages = document.spec.stages
    known = [(stage, one) for stage in stages for one in stage.variants if one.family == "vision-transformer"]
    fitting = [(stage, one) for stage, one in known if name in {None, one.name}]
    if len(fitting) != 1:
        names = ", ".join(one.name for _, one in known) or "none"
        raise ValueError(f"name one vision transformer with --variant; there are: {names}")
    return fitting[0]


def _images_alone(document: InferencePipeline) -> InferencePipeline:
    """As if images were all that is asked, and labels all that is answered: the samples are of one task."""
    spec = document.spec
    images = tuple(each for each in spec.inputs if each.name == "image")
    labels = tuple(each for each in spec.outputs if each.name == "label")
    if not images or not labels:
        raise ValueError("the pipeline must take an input image and give an output label")
    return document.model_copy(update={"spec": spec.model_copy(update={"inputs": images, "outputs": labels})})


def _read(source: LabelledPayloads, most: int | None) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Images [n, channels, side, side] and labels [n], in the samples' order."""
    payloads = [source.payload(index) for index in range(min(most or len(source), len(source)))]
    pixels = np.concatenate([payload.inputs[0].array for payload in payloads])
    return pixels, np.array([_label(payload.truth) for payload in payloads], np.int64)


def _label(truth: object) -> int:
    value = next(iter(truth.values())) if isinstance(truth, dict) else truth
    if not isinstance(value, int | np.integer):
        raise ValueError(f"label {value!r} is no whole number")
    return int(value)
