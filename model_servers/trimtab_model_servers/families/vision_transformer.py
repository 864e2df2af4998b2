"""Vision transformers with token merging or prompts, chosen by each batch's operating point; batches may mix tasks.

Inputs are `image` [B, channels, side, side] and, with several tasks, the number of the `task` INT64 [B]; outputs are
`label` INT64 [B], `confidence` FP32 [B] and `logits` FP32 [B, maximum classes]. Weights are Trimtab's, torchvision's or
timm's.
"""

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.interfaces import Built, read_parameters
from trimtab_model_servers.int8 import quantize_linear_layers
from trimtab_model_servers.model_protocol import Fact
from trimtab_model_servers.transformer.checkpoint_import import CheckpointInfo
from trimtab_model_servers.transformer.checkpoints import Checkpoint, load, random_checkpoint
from trimtab_model_servers.transformer.compiled import PREFIX as FORM_PREFIX
from trimtab_model_servers.transformer.compiled import Compiled, load_form
from trimtab_model_servers.transformer.config import SHAPES, Normalisation, preprocess
from trimtab_model_servers.transformer.merging import RULES
from trimtab_model_servers.transformer.task_registry import ActiveTasks, TaskRegistry, fingerprint
from trimtab_model_servers.transformer.tasks import RowGroup, prompt_variant, require_trained
from trimtab_model_servers.transformer.transformer import ForwardPlan, VisionTransformer, forward_plan
from trimtab_model_servers.weights.files import FetchLimits
from trimtab_model_servers.weights.loading import CPU
from trimtab_model_servers.weights.source import RandomSeed, find_weights
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.tasks import MAX_TASK_FILE_BYTES, NO_TASK, TASK_INPUT, Task
from trimtab_protocol.extensions import task_metadata

KNOBS = frozenset({"merging", "prompts", "precision", "compiled"})
TAKES_TASKS = True
COMPUTE_DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16}
log = logging.getLogger(__name__)


class TransformerParameters(CheckpointInfo):
    """Settings of the family."""

    proportional_attention: bool = Field(
        default=True, description="Weight merged tokens in attention by the number of their patches"
    )
    size: Literal["tiny", "small", "base", "large"] = Field(default="base", description="Of random weights")


@dataclass(frozen=True, slots=True)
class PreparedPoint:
    """An operating point, prepared for batches."""

    plan: ForwardPlan
    """Without prompts, which depend on the tasks of a batch."""
    prompt_variant: str
    """Selects the heads and prompts of the tasks."""
    compute_dtype: torch.dtype | None
    """Autocast dtype; None for FP32. The weights are not copied."""
    int8: bool
    """Whether linear layers compute in INT8, with a quantized copy of the weights."""
    compiled: Compiled | None = None
    """Native code of the plan, for rows without prompts."""
    temperatures: Mapping[str, float] = field(default_factory=dict)
    """Temperature of the confidence by task; 1 for others."""


@dataclass(slots=True)
class ServedTransformer:
    """One transformer in memory, shared by all operating points and tasks."""

    transformer: VisionTransformer
    normalisation: Normalisation
    points: dict[str, PreparedPoint]
    task_registry: TaskRegistry
    active_tasks: ActiveTasks
    int8_transformer: VisionTransformer | None = None
    """Quantized copy, if an operating point uses it."""
    device: torch.device = CPU

    def infer(self, inputs: dict[str, Tensor], point: OperatingPoint) -> dict[str, Tensor]:
        """Classify a batch, each row by the head of its task."""
        images, prepared, active = inputs["image"], self.points[point.name], self.active_tasks
        tasks = (
            inputs[TASK_INPUT].view(-1) if TASK_INPUT in inputs else images.new_zeros(len(images), dtype=torch.int64)
        )
        indices, valid = active.bank_indices_of(tasks)
        bank = active.banks[prepared.prompt_variant]
        logits = bank.logits(self._features(images, bank.group_rows(indices), prepared), indices)
        temperatures = active.by_bank_index(prepared.temperatures, 1.0).to(logits.device)
        confidence, label = (logits / temperatures[indices, None]).softmax(dim=1).max(dim=1)
        return {
            "label": label.where(valid, NO_TASK),
            "confidence": confidence.where(valid, 0.0),
            "logits": pad(logits, (0, bank.max_classes - logits.shape[1]), value=-torch.inf),
        }

    def _features(self, images: Tensor, groups: Sequence[RowGroup], prepared: PreparedPoint) -> Tensor:
        """Features [B, d]; row groups with different prompts run one after the other."""
        single = len(groups) == 1
        batches = [images if single else images[group.rows] for group in groups]
        features = [
            self._forward(preprocess(batch, self.normalisation), group.prompts, prepared)
            for batch, group in zip(batches, groups, strict=True)
        ]
        if single:
            return features[0]
        return torch.cat(features)[torch.argsort(torch.cat([group.rows for group in groups]))]

    def _forward(self, images: Tensor, prompts: Tensor | None, prepared: PreparedPoint) -> Tensor:
        """Run rows with the same prompts through the transformer, or through native code if it fits."""
        if prepared.compiled is not None and prompts is None and len(images) <= prepared.compiled.max_rows:
            return prepared.compiled.run(images)
        transformer = self.int8_transformer if prepared.int8 and self.int8_transformer is not None else self.transformer
        with torch.autocast(images.device.type, prepared.compute_dtype, enabled=prepared.compute_dtype is not None):
            features: Tensor = transformer(images, replace(prepared.plan, prompts=prompts))
        return features

    def add_compiled_point(self, point: OperatingPoint, like: str, folder: Path) -> None:
        """Add a point equal to ``like``, but with the compiled form that it names; ModelError if that is unusable."""
        form = load_form(point.compiled or "", folder, self.transformer)
        self.points[point.name] = replace(self.points[like], compiled=form)

    def reload_tasks(self) -> None:
        """Load the current tasks of the task folder; a running batch keeps the former ones."""
        if self.task_registry.changed():
            self.active_tasks = self.task_registry.snapshot().to(self.device)

    def move_to(self, device: torch.device) -> None:
        """Move the transformer and the tasks, now and later ones, to a device."""
        if self.int8_transformer is not None and device != CPU:
            raise ModelError("precision INT8 is computed on the CPU alone; remove such operating points, or the GPU")
        compiled = next((name for name, point in self.points.items() if point.compiled is not None), None)
        if compiled is not None and device != CPU:
            raise ModelError(f"operating point {compiled!r} is compiled for the CPU; remove it, or the GPU")
        self.device = device
        self.transformer.to(device)
        self.active_tasks = self.active_tasks.to(device)

    def facts(self) -> dict[str, Fact]:
        return {**task_metadata(self.active_tasks.names, self.active_tasks.rejected, self.active_tasks.accuracies)}


def build(spec: ModelSpec) -> Built:
    settings = read_parameters(TransformerParameters, spec)
    weights = find_weights(spec.storage_uri, spec.digest)
    if isinstance(weights, RandomSeed):
        stored, folder = random_checkpoint(SHAPES[settings.size], weights.value), None
    else:
        stored, folder = load(weights, settings), weights.parent
    _require_images(spec, stored)
    if spec.tasks and all(tensor.name != TASK_INPUT for tensor in spec.inputs):
        raise ModelError(
            f"the variant has task {spec.tasks[0].name!r}, but its stage has no input {TASK_INPUT!r} to select it"
        )
    proportional = settings.proportional_attention
    points = {point.name: _prepare(point, stored, proportional=proportional) for point in spec.operating_points}
    task_registry = TaskRegistry(
        stored,
        spec.operating_points,
        fingerprint=_fingerprint(stored, proportional=proportional) if spec.tasks or spec.tasks_folder else "",
        pipeline_tasks=[(task.name, None if task.removed else _task_file(task)) for task in spec.tasks],
        folder=Path(spec.tasks_folder) if spec.tasks_folder else None,
        max_classes=_max_classes(spec),
    )
    _require_trained(spec, task_registry)
    served = ServedTransformer(
        stored.transformer, stored.normalisation, points, task_registry, task_registry.snapshot()
    )
    for point in spec.operating_points:
        if point.compiled is not None:
            _load_compiled_form(served, point, folder, spec.max_batch_size)
    if any(prepared.int8 for prepared in points.values()):
        served.int8_transformer = deepcopy(stored.transformer)
        quantize_linear_layers(served.int8_transformer)
    return Built.of(served, random=folder is None)


def _require_trained(spec: ModelSpec, task_registry: TaskRegistry) -> None:
    """Reject a point whose prompts no task has; with a task folder, only log it."""
    for point in spec.operating_points:
        try:
            require_trained(point, task_registry.prompt_variants)
        except ModelError as error:
            if not spec.tasks_folder:
                raise
            log.warning("%s; until such a task is registered, all tasks use their plain heads", error)


def _fingerprint(stored: Checkpoint, *, proportional: bool) -> str:
    """Fingerprint of the transformer and its settings, which task files must match."""
    settings = {} if proportional else {"proportional_attention": False}
    return fingerprint(stored.transformer, {**stored.settings, **settings})


def _task_file(task: Task) -> Path:
    path = find_weights(task.storage_uri, task.digest, FetchLimits(max_bytes=MAX_TASK_FILE_BYTES))
    if isinstance(path, RandomSeed):
        raise ModelError(f"task {task.name!r}: a task cannot have random weights; `trimtab train-task` writes a file")
    return path


def _max_classes(spec: ModelSpec) -> int | None:
    """Number of logits that the stage declares, if it does."""
    declared = next((tensor.shape for tensor in spec.outputs if tensor.name == "logits"), ())
    return declared[-1] if declared and declared[-1] > 0 else None


def _prepare(point: OperatingPoint, stored: Checkpoint, *, proportional: bool) -> PreparedPoint:
    where, shape = f"operating point {point.name!r}", stored.transformer.shape
    if point.merging and point.merging.rule and point.merging.rule not in RULES:
        raise ModelError(f"{where}: unknown merging.rule {point.merging.rule!r}; there are: {', '.join(RULES)}")
    try:
        plan = forward_plan(point, shape.depth, proportional=proportional)
    except ValueError as error:
        raise ModelError(f"{where}: merging.schedule: {error}") from error
    excess = next((count for count in plan.merged if count > shape.patches // 2), None)
    if excess is not None:
        raise ModelError(
            f"{where}: merging.schedule merges {excess} tokens in a layer; of {shape.patches} patches a layer "
            f"merges at most {shape.patches // 2}"
        )
    variant, dtype = prompt_variant(point), COMPUTE_DTYPES.get(point.precision or "FP32")
    temperatures = stored.temperatures.get(variant, {})
    return PreparedPoint(plan, variant, dtype, int8=point.precision == "INT8", temperatures=temperatures)


def _load_compiled_form(served: ServedTransformer, point: OperatingPoint, folder: Path | None, max_rows: int) -> None:
    where, name = f"operating point {point.name!r}", point.compiled or ""
    if not name.startswith(FORM_PREFIX):
        raise ModelError(f"{where}: unknown compiled form {name!r}; `trimtab tune` writes them, as {FORM_PREFIX}…")
    if point.prompts is not None or point.precision == "INT8":
        raise ModelError(f"{where}: a compiled form supports neither prompts nor INT8")
    if folder is None:
        raise ModelError(f"{where}: compiled forms are stored with the weights; random weights have none")
    try:
        served.add_compiled_point(point, point.name, folder)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error
    compiled = served.points[point.name].compiled
    if compiled is not None and compiled.max_rows < max_rows:
        raise ModelError(
            f"{where}: {name} was compiled for {compiled.max_rows} rows at most, and the variant's maxBatchSize is "
            f"{max_rows}; compile it again with `trimtab tune`"
        )


def _require_images(spec: ModelSpec, stored: Checkpoint) -> None:
    shape = stored.transformer.shape
    expected = [shape.channels, shape.side, shape.side]
    image = next((tensor for tensor in spec.inputs if tensor.name == "image"), None)
    if image is None or list(image.shape) != expected:
        declared = "none" if image is None else str(list(image.shape))
        raise ModelError(f"family {spec.family!r} reads an input image of shape {expected}; the stage has {declared}")
