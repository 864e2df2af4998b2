"""`trimtab train-task`: a new task for a vision transformer that serves others, from a user's labelled images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.progress import BarColumn, Progress, TextColumn

from trimtab.decisions import terminal_table
from trimtab.options import PipelineArgument, SeedOption, console
from trimtab.preparation import prepare
from trimtab_loadtester.labelled import LabelledPayloads
from trimtab_pipelines.evidence import Accuracy, measured
from trimtab_pipelines.model_spec import resolve_uri
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.quantity import parse_duration
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.tasks import TaskCard, TaskClass
from trimtab_pipelines.variants import Variant
from trimtab_pipelines.verdict import Outcome

if TYPE_CHECKING:  # or the help would import torch
    from trimtab_model_servers.tokens.prompting import Labelled
    from trimtab_model_servers.tokens.stored import Stored

HELD_OUT = 0.25
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
    """Train a new task for a vision transformer: a head, and prompts where its other tasks have some.

    The transformer and its other tasks stay as they are. A quarter of the images is held out; on these the task is
    judged at every operating point. The file is named among the variant's `tasks`, or registered at a router that runs.
    """
    document = prepare(pipeline)
    granted = TaskClass(utility=utility, latency_seconds=parse_duration(latency) if latency else None)
    chosen = _variant(document, variant)
    found = _read(_images_alone(document), samples, seed, most)
    with Progress(TextColumn("{task.description}"), BarColumn(), console=console) as shown:
        bar = shown.add_task("training", total=1)
        home = pipeline if pipeline.is_dir() else pipeline.parent
        uri = resolve_uri(chosen.storage_uri, home)
        made = _trained(chosen, uri, task, found, (steps, seed), lambda share: shown.update(bar, completed=share))
    judged = _written(made, task, chosen.points, granted, out)
    _tell(task, out, judged)
    return 0


@dataclass(frozen=True, slots=True)
class _Made:
    """What training gave, and the images held out of it."""

    stored: "Stored"
    held_out: "Labelled"


def _trained(
    variant: Variant,
    uri: str,
    task: str,
    found: tuple[NDArray[Any], NDArray[np.int64]],
    lesson: tuple[int, int],
    advance: Callable[[float], None],
) -> _Made:
    """Train; `advance` is told which share is done."""
    import torch  # noqa: PLC0415  (slow to import)

    from trimtab_model_servers.errors import ModelError  # noqa: PLC0415
    from trimtab_model_servers.store import find_weights  # noqa: PLC0415
    from trimtab_model_servers.tokens.enrolling import enrolled  # noqa: PLC0415
    from trimtab_model_servers.tokens.prompting import Labelled, Lesson  # noqa: PLC0415
    from trimtab_model_servers.tokens.stored import load  # noqa: PLC0415

    pixels, labels = map(torch.from_numpy, found)
    border = max(int(len(labels) * (1.0 - HELD_OUT)), 1)
    steps, seed = lesson
    learned = Labelled(pixels[:border], labels[:border])
    try:
        stored = load(_file(find_weights(uri, variant.digest)))
        made = enrolled(stored, task, learned, variant.points, Lesson(steps=steps, seed=seed), advance)
    except ModelError as error:
        raise ValueError(str(error)) from error
    return _Made(made, Labelled(pixels[border:], labels[border:]))


def _written(
    made: _Made, task: str, points: Sequence[OperatingPoint], granted: TaskClass, out: Path
) -> dict[str, Accuracy]:
    """Judge the task on the images held out at every point, and write its file."""
    from trimtab_model_servers.tokens.enrolling import right_of  # noqa: PLC0415
    from trimtab_model_servers.tokens.task_files import fingerprint, save_task  # noqa: PLC0415

    count = len(made.held_out.labels)
    judged = {point.name: measured(right_of(made.stored, point, task, made.held_out), count) for point in points}
    card = TaskCard(
        **granted.model_dump(by_alias=False),
        classes=made.stored.tasks[task],
        transformer=fingerprint(made.stored.transformer),
        accuracy_by_point=judged,
    )
    save_task(out, card, {way: by_task[task] for way, by_task in made.stored.heads.items()})
    return judged


def _file(weights: object) -> Path:
    if not isinstance(weights, Path):
        raise ValueError("random weights have learned nothing that a task could build on; give the variant weights")
    return weights


def _tell(task: str, out: Path, judged: Mapping[str, Accuracy]) -> None:
    rows = []
    for name, one in judged.items():
        rows.append((name, f"{one.value:.4f}", f"{one.low:.4f} – {one.high:.4f}", str(one.samples)))
        told = f"{{value: {one.value}, source: Measured, samples: {one.samples}, low: {one.low}, high: {one.high}}}"
        console.print(f"{name}: accuracyByTask: {task}: {told}")
    console.print(terminal_table(COLUMNS, rows, f"{task}, on images held out"))
    console.print(f"the task: {out}")
    held_out = next(iter(judged.values())).samples
    figures = {f"{name}_accuracy": one.value for name, one in judged.items()}
    Outcome(name="train-task", figures={"task": task, "held_out": held_out} | figures).print()


def _variant(document: InferencePipeline, name: str | None) -> Variant:
    """The variant of that name, or the only vision transformer there is."""
    known = [v for stage in document.spec.stages for v in stage.variants if v.family == "vision-transformer"]
    fitting = [one for one in known if name in {None, one.name}]
    if len(fitting) != 1:
        names = ", ".join(one.name for one in known) or "none"
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


def _read(
    document: InferencePipeline, samples: str, seed: int, most: int | None
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Images [n, channels, side, side] and labels [n], in an order drawn by the seed."""
    source = LabelledPayloads(document, samples, seed)
    payloads = [source.payload(index) for index in range(min(most or len(source), len(source)))]
    pixels = np.concatenate([payload.inputs[0].array for payload in payloads])
    return pixels, np.array([_label(payload.truth) for payload in payloads], np.int64)


def _label(truth: object) -> int:
    value = next(iter(truth.values())) if isinstance(truth, dict) else truth
    if not isinstance(value, int | np.integer):
        raise ValueError(f"label {value!r} is no whole number")
    return int(value)
