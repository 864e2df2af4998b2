"""`trimtab train-task`: a new task for a vision transformer that serves others, from a user's labelled images."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.progress import BarColumn, Progress, TextColumn

from trimtab.decisions import terminal_table
from trimtab.options import PipelineArgument, SeedOption, console
from trimtab.preparation import prepare
from trimtab_loadtester.labelled import LabelledPayloads
from trimtab_pipelines.evidence import wilson_interval
from trimtab_pipelines.model_spec import resolve_uri
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.variants import Variant
from trimtab_pipelines.verdict import Outcome

HELD_OUT = 0.25
COLUMNS = ("point", "accuracy", "95 % interval", "images")


def command(
    pipeline: PipelineArgument,
    task: Annotated[str, typer.Argument(help="Name of the new task")],
    samples: Annotated[
        str, typer.Option("--samples", metavar="DIR|module:Class", help="Images with their labels, 0, 1, 2 and so on")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the weights with the new task here")],
    variant: Annotated[str | None, typer.Option("--variant", help="Whose weights; default: the only one's")] = None,
    most: Annotated[int | None, typer.Option("--most", min=8, help="Use so many images at most")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Of training, for each way the model runs")] = 300,
    seed: SeedOption = 0,
) -> int:
    """Train a new task for a vision transformer: a head, and prompts where its other tasks have some.

    The transformer and its other tasks stay as they are. A quarter of the images is held out; on these the task is
    judged at every operating point. What is printed below the table belongs into the pipeline's points.
    """
    document = prepare(pipeline)
    chosen = _variant(document, variant)
    found = _read(_images_alone(document), samples, seed, most)
    with Progress(TextColumn("{task.description}"), BarColumn(), console=console) as shown:
        bar = shown.add_task("training", total=None)
        home = pipeline if pipeline.is_dir() else pipeline.parent
        uri = resolve_uri(chosen.storage_uri, home)
        right, count = _trained(
            chosen, uri, task, found, out, (steps, seed), lambda way: shown.update(bar, description=f"trained {way}")
        )
    _tell(task, out, right, count)
    return 0


def _trained(
    variant: Variant,
    uri: str,
    task: str,
    found: tuple[NDArray[Any], NDArray[np.int64]],
    out: Path,
    lesson: tuple[int, int],
    tell: Callable[[str], None],
) -> tuple[dict[str, int], int]:
    """Train and write; how many of so many images held out are answered rightly, by point."""
    import torch  # noqa: PLC0415  (slow to import)

    from trimtab_model_servers.errors import ModelError  # noqa: PLC0415
    from trimtab_model_servers.store import find_weights  # noqa: PLC0415
    from trimtab_model_servers.tokens.enrolling import enrolled, right_of  # noqa: PLC0415
    from trimtab_model_servers.tokens.prompting import Labelled, Lesson  # noqa: PLC0415
    from trimtab_model_servers.tokens.stored import load, save  # noqa: PLC0415

    pixels, labels = map(torch.from_numpy, found)
    border = max(int(len(labels) * (1.0 - HELD_OUT)), 1)
    steps, seed = lesson
    try:
        learned = Labelled(pixels[:border], labels[:border])
        made = enrolled(
            load(_file(find_weights(uri, variant.digest))),
            task,
            learned,
            variant.points,
            Lesson(steps=steps, seed=seed),
            tell,
        )
    except ModelError as error:
        raise ValueError(str(error)) from error
    out.parent.mkdir(parents=True, exist_ok=True)
    save(made, out, {"task": task, "seed": str(seed)})
    held_out = Labelled(pixels[border:], labels[border:])
    return {point.name: right_of(made, point, task, held_out) for point in variant.points}, len(held_out.labels)


def _file(weights: object) -> Path:
    if not isinstance(weights, Path):
        raise ValueError("random weights have learned nothing that a task could build on; give the variant weights")
    return weights


def _tell(task: str, out: Path, right: dict[str, int], count: int) -> None:
    rows = []
    for name, hits in right.items():
        low, high = wilson_interval(hits, count)
        rows.append((name, f"{hits / count:.4f}", f"{low:.4f} – {high:.4f}", str(count)))
        console.print(
            f"{name}: accuracyByTask: {task}: "
            f"{{value: {hits / count:.4f}, source: Measured, samples: {count}, low: {low:.4f}, high: {high:.4f}}}",
            markup=False,
        )
    console.print(terminal_table(COLUMNS, rows, f"{task}, on images held out"))
    console.print(f"weights with the task: {out}", markup=False)
    figures = {f"{name}_accuracy": round(hits / count, 4) for name, hits in right.items()}
    Outcome(name="train-task", figures={"task": task, "held_out": count} | figures).print()


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
