"""Training of a task for a variant, on its model in this process, and its evaluation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.registry import build
from trimtab_model_servers.families.vision_transformer import ServedTransformer
from trimtab_model_servers.transformer.task_registry import save_task
from trimtab_model_servers.transformer.tasks import PLAIN, Head, prompt_variant
from trimtab_model_servers.transformer.transformer import ForwardPlan
from trimtab_pipelines.accuracy_evidence import Accuracy, measured_accuracy
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.tasks import MAX_TASK_FILE_BYTES, TaskRecord, TaskTerms, file_name, parse_file_name
from trimtab_training.task_training import CHUNK, LabelledImages, PromptSpec, select_fitting, train_task
from trimtab_training.trainer import Schedule

HELD_OUT = 0.25
HEADER_BYTES = 2**16
"""Part of a task's file that its record may need."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """Result of a training."""

    accuracy_by_point: Mapping[str, Accuracy]
    """On the images held out."""
    excluded: Sequence[str]
    """Prompt variants that the task's file has no room for; their points run the task with the next best."""


@dataclass(frozen=True, slots=True)
class TaskTraining:
    """A variant for which tasks are trained."""

    spec: ModelSpec
    schedule: Schedule
    """Schedule for each prompt variant."""
    on_progress: Callable[[float], None]
    """Called with the completed share of the training."""

    def train(self, task: str, images: LabelledImages, terms: TaskTerms, out: Path, samples_digest: str) -> TaskReport:
        """Train a task, evaluate it at every point on the last of the images, which are held out, and write its file.

        Raises ValueError if the variant cannot be loaded, or does not accept the task.
        """
        border = max(int(len(images.labels) * (1.0 - HELD_OUT)), 1)
        training = LabelledImages(images.pixels[:border], images.labels[:border])
        held_out = LabelledImages(images.pixels[border:], images.labels[border:])
        with TemporaryDirectory() as folder:
            try:
                model = _load_model(self.spec, folder)
                number = _task_number(model, task)
                variants = _prompt_variants(model, self.spec.operating_points)
                classes = int(training.labels.max()) + 1
                fitted = select_fitting(variants, classes, model.transformer.shape, MAX_TASK_FILE_BYTES - HEADER_BYTES)
                heads = train_task(
                    model.transformer, model.normalisation, training, fitted, self.schedule, self.on_progress
                )
            except ModelError as error:
                raise ValueError(str(error)) from error
            record = _record(heads, model.task_registry.fingerprint, terms)
            _register(model, Path(folder) / file_name(number, task), record, heads)
            accuracies = {
                point.name: _evaluate(model, point, number, held_out, samples_digest)
                for point in self.spec.operating_points
            }
        save_task(out, record.replace(accuracy_by_point=accuracies), heads)
        return TaskReport(accuracies, [variant for variant in variants if variant not in fitted])


def _load_model(spec: ModelSpec, folder: str) -> ServedTransformer:
    """The model that a replica with these settings has, which follows a folder of tasks."""
    built = build(spec.replace(tasks=(), tasks_folder=folder))
    if built.weights == "random":
        raise ValueError("random weights have learned nothing that a task could build on; give the variant weights")
    if not isinstance(built.network, ServedTransformer):
        raise ValueError(f"variant {spec.name}: family {spec.family!r} takes no tasks")
    return built.network


def _task_number(model: ServedTransformer, task: str) -> int:
    names = model.active_tasks.names
    if parse_file_name(file_name(len(names), task)) is None:
        raise ValueError(f"task {task!r}: a name consists of lower-case letters, digits and dashes")
    if task in names:
        raise ValueError(f"task {task!r} exists; the weights have: {', '.join(names)}")
    return len(names)


def _prompt_variants(model: ServedTransformer, points: Sequence[OperatingPoint]) -> dict[str, PromptSpec]:
    """Map prompt variants to the forward plans that replicas run."""
    return {PLAIN: PromptSpec(ForwardPlan())} | {
        prompt_variant(point): PromptSpec(model.points[point.name].plan, point.prompts.count if point.prompts else 0)
        for point in points
    }


def _record(heads: Mapping[str, Head], mark: str, terms: TaskTerms) -> TaskRecord:
    classes = tuple(str(label) for label in range(len(heads[PLAIN].bias)))
    return TaskRecord(**terms.model_dump(by_alias=False), classes=classes, transformer=mark)


def _register(model: ServedTransformer, path: Path, record: TaskRecord, heads: Mapping[str, Head]) -> None:
    save_task(path, record, heads)
    model.reload_tasks()
    if path.stem in model.active_tasks.rejected:
        raise ValueError(f"replicas reject the task: {model.active_tasks.rejected[path.stem]}")


def _evaluate(
    model: ServedTransformer, point: OperatingPoint, number: int, images: LabelledImages, samples_digest: str
) -> Accuracy:
    """Measure the accuracy and the mean confidence of a point on a task's images."""
    correct, confidences = 0, list[float]()
    with torch.inference_mode():
        for pixels, labels in zip(torch.split(images.pixels, CHUNK), torch.split(images.labels, CHUNK), strict=True):
            outputs = model.infer({"image": pixels, "task": torch.full_like(labels, number)}, point)
            correct += int((outputs["label"] == labels).sum())
            confidences += outputs["confidence"].tolist()
    return measured_accuracy(correct, len(images.labels), confidences, samples_digest)
