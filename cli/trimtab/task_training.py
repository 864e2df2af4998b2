"""A task trained for a variant as its replicas run it, joined to one in this process, and judged by its answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.registry import build
from trimtab_model_servers.families.vision_transformer import ServedTransformer
from trimtab_model_servers.transformer.prompt_selection import PLAIN, prompt_variant
from trimtab_model_servers.transformer.task_files import save_task
from trimtab_model_servers.transformer.tasks import Head
from trimtab_model_servers.transformer.transformer import ForwardPlan
from trimtab_pipelines.accuracy_evidence import Accuracy, measured_accuracy
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.tasks import MAX_TASK_FILE_BYTES, TaskRecord, TaskTerms, file_name, parse_file_name
from trimtab_training.prompt_tuning import CHUNK, Labelled, TrainingSchedule
from trimtab_training.task_training import TrainedTask, fitting, train_task

HELD_OUT = 0.25
HEADER_BYTES = 2**16
"""Of a task's file, room for its card."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """A task that joined.

    Attributes:
        accuracy_by_point: on the images held out, by what a replica answers.
        left_out: ways that its file has no room for; where points run them, the task runs with the next best.
    """

    accuracy_by_point: Mapping[str, Accuracy]
    left_out: Sequence[str]


@dataclass(frozen=True, slots=True)
class TaskTraining:
    """A variant that a task joins, on its own in this process.

    Attributes:
        spec: what its replicas serve.
        lesson: how long a task is trained, for each way.
        advance: told which share of the training is done.
    """

    spec: ModelSpec
    lesson: TrainingSchedule
    advance: Callable[[float], None]

    def train(self, task: str, images: Labelled, granted: TaskTerms, out: Path, samples_digest: str) -> TaskReport:
        """Train a task, join it, judge it on the images held out at every point, and write its file.

        Args:
            task: its name.
            images: to learn from; the last of them are held out.
            granted: what its requests are.
            out: its file.
            samples_digest: of the samples that all these images are.

        Raises:
            ValueError: the variant cannot be loaded, or the task cannot join it; the message says why.
        """
        border = max(int(len(images.labels) * (1.0 - HELD_OUT)), 1)
        learned = Labelled(images.pixels[:border], images.labels[:border])
        held_out = Labelled(images.pixels[border:], images.labels[border:])
        with TemporaryDirectory() as folder:
            try:
                served = _served(self.spec, folder)
                number = _number(served, task)
                every = _taught(served, self.spec.operating_points)
                classes = int(learned.labels.max()) + 1
                taught = fitting(every, classes, served.transformer.shape, MAX_TASK_FILE_BYTES - HEADER_BYTES)
                heads = train_task(served.transformer, served.normalisation, learned, taught, self.lesson, self.advance)
            except ModelError as error:
                raise ValueError(str(error)) from error
            card = _card(heads, served.roll.mark, granted)
            _join(served, Path(folder) / file_name(number, task), card, heads)
            judged = {
                point.name: _judged(served, point, number, held_out, samples_digest)
                for point in self.spec.operating_points
            }
        save_task(out, card.model_copy(update={"accuracy_by_point": judged}), heads)
        return TaskReport(judged, [each for each in every if each not in taught])


def _served(spec: ModelSpec, folder: str) -> ServedTransformer:
    """The model that a replica with these settings has, which follows a folder of tasks."""
    built = build(spec.model_copy(update={"tasks": (), "tasks_folder": folder}))
    if built.weights == "random":
        raise ValueError("random weights have learned nothing that a task could build on; give the variant weights")
    if not isinstance(built.network, ServedTransformer):
        raise ValueError(f"variant {spec.name}: family {spec.family!r} takes no tasks")
    return built.network


def _number(served: ServedTransformer, task: str) -> int:
    names = served.in_force.names
    if parse_file_name(file_name(len(names), task)) is None:
        raise ValueError(f"task {task!r}: a name has lower-case letters, digits and dashes")
    if task in names:
        raise ValueError(f"there is a task {task!r} already; the weights have: {', '.join(names)}")
    return len(names)


def _taught(served: ServedTransformer, points: Sequence[OperatingPoint]) -> dict[str, TrainedTask]:
    """Every way that points run: on the course that the replica runs there."""
    return {PLAIN: TrainedTask(ForwardPlan())} | {
        prompt_variant(point): TrainedTask(
            served.points[point.name].course, point.prompts.count if point.prompts else 0
        )
        for point in points
    }


def _card(heads: Mapping[str, Head], mark: str, granted: TaskTerms) -> TaskRecord:
    classes = tuple(str(label) for label in range(len(heads[PLAIN].bias)))
    return TaskRecord(**granted.model_dump(by_alias=False), classes=classes, transformer=mark)


def _join(served: ServedTransformer, path: Path, card: TaskRecord, heads: Mapping[str, Head]) -> None:
    """Have it in force as a task that is registered while a replica runs."""
    save_task(path, card, heads)
    served.reread()
    if path.stem in served.in_force.refused:
        raise ValueError(f"a replica would not take it: {served.in_force.refused[path.stem]}")


def _judged(
    served: ServedTransformer, point: OperatingPoint, number: int, images: Labelled, samples_digest: str
) -> Accuracy:
    """How often a point answers a task's images rightly, and how certain it is of them."""
    right, confidences = 0, list[float]()
    with torch.inference_mode():
        for pixels, labels in zip(*(torch.split(one, CHUNK) for one in (images.pixels, images.labels)), strict=True):
            found = served.infer({"image": pixels, "task": torch.full_like(labels, number)}, point)
            right += int((found["label"] == labels).sum())
            confidences += found["confidence"].tolist()
    return measured_accuracy(right, len(images.labels), confidences, samples_digest)
