"""Vision transformers that merge tokens or take prompts, as each batch's operating point says; tasks mix in a batch.

`image` [B, channels, side, side] and, where there are several tasks, `task` INT64 [B], the task's number; out come
`label` INT64 [B], `confidence` FP32 [B] and `logits` FP32 [B, most classes]. Weights are ours, torchvision's or timm's.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from trimtab_model_servers.download_limits import FetchLimits
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.interfaces import CPU, Built
from trimtab_model_servers.families.parameters import Parameters, read_parameters
from trimtab_model_servers.model_metadata import Fact
from trimtab_model_servers.transformer.checkpoint_import import CheckpointInfo
from trimtab_model_servers.transformer.checkpoints import Checkpoint, load, randomly
from trimtab_model_servers.transformer.compiled import PREFIX as FORM_PREFIX
from trimtab_model_servers.transformer.compiled import Compiled, load_form
from trimtab_model_servers.transformer.config import SHAPES, Activation
from trimtab_model_servers.transformer.image_preprocessing import Normalisation, preprocess
from trimtab_model_servers.transformer.merge_rules import RULES
from trimtab_model_servers.transformer.prompt_selection import prompt_variant, require_trained
from trimtab_model_servers.transformer.quantization import quantize
from trimtab_model_servers.transformer.task_files import fingerprint
from trimtab_model_servers.transformer.task_registry import ActiveTasks, TaskRegistry
from trimtab_model_servers.transformer.tasks import RowGroup
from trimtab_model_servers.transformer.transformer import ForwardPlan, VisionTransformer, course_of
from trimtab_model_servers.weights_source import RandomSeed, find_weights
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.tasks import MAX_TASK_FILE_BYTES, NO_TASK, TASK_INPUT, Task
from trimtab_protocol.extensions import task_metadata

KNOBS = frozenset({"merging", "prompts", "precision", "compiled"})
TAKES_TASKS = True
HALVES = {"BF16": torch.bfloat16, "FP16": torch.float16}
log = logging.getLogger(__name__)


class TransformerParameters(Parameters):
    """Settings of the family."""

    heads: int | None = Field(
        default=None, ge=1, description="Heads of attention, where neither the weights nor a published size tell"
    )
    epsilon: float | None = Field(
        default=None, gt=0, description="Added to variances; else 1e-5 with a normalisation before the layers, or 1e-6"
    )
    activation: Activation | None = Field(default=None, description="Of the perceptrons; else GELU")
    normalisation: Normalisation | None = Field(default=None, description="Of images, where the weights do not say")
    proportional_attention: bool = Field(
        default=True, description="Merged tokens count in attention as often as they stand for a patch"
    )
    size: Literal["tiny", "small", "base", "large"] = Field(default="base", description="Of random weights")

    @property
    def told(self) -> CheckpointInfo:
        """What they say of weights that do not tell it themselves."""
        return CheckpointInfo(self.heads, self.epsilon, self.activation, self.normalisation)


@dataclass(frozen=True, slots=True)
class Prepared:
    """An operating point made ready: all that a batch needs to know of it."""

    course: ForwardPlan
    """Without the prompts, which are those of a batch's tasks."""
    way: str
    """What it does, which tells whose heads and prompts it runs with."""
    half: torch.dtype | None
    """What products are computed in, where that is not FP32; the weights stay as they are, without a second copy."""
    rounded: bool
    """Whether linear layers compute in INT8, by a copy of their weights that has a quarter of the size."""
    compiled: Compiled | None = None
    """The course as native code, for rows that have no prompts."""
    temperatures: Mapping[str, float] = field(default_factory=dict)
    """By task: that logits are divided by before they are a confidence; 1 for the others."""


@dataclass(slots=True)
class ServedTransformer:
    """One transformer in memory, whatever the number of its points and tasks."""

    transformer: VisionTransformer
    normalisation: Normalisation
    points: dict[str, Prepared]
    roll: TaskRegistry
    in_force: ActiveTasks
    twin: VisionTransformer | None = None
    """The same in INT8, where a point asks for it."""
    device: torch.device = CPU

    def infer(self, inputs: dict[str, Tensor], point: OperatingPoint) -> dict[str, Tensor]:
        """Classify a batch, each row under its own task."""
        images, ready, now = inputs["image"], self.points[point.name], self.in_force
        asked = inputs.get(TASK_INPUT)
        tasks = torch.zeros(len(images), dtype=torch.int64, device=images.device) if asked is None else asked.view(-1)
        places, known = now.places_of(tasks)
        bank = now.banks[ready.way]
        logits = bank.logits(self._features(images, bank.alike(places), ready), places)
        temperatures = now.by_place(ready.temperatures, 1.0).to(logits.device)
        confidence, label = (logits / temperatures[places, None]).softmax(dim=1).max(dim=1)
        return {
            "label": label.where(known, NO_TASK),
            "confidence": confidence.where(known, 0.0),
            "logits": pad(logits, (0, bank.most_classes - logits.shape[1]), value=-torch.inf),
        }

    def _features(self, images: Tensor, parts: Sequence[RowGroup], ready: Prepared) -> Tensor:
        """What the heads read, [B, d]; rows that are not alike go through the transformer one part after the other."""
        whole = len(parts) == 1
        found = [
            self._through(preprocess(images if whole else images[part.rows], self.normalisation), part.prompts, ready)
            for part in parts
        ]
        return found[0] if whole else torch.cat(found)[torch.argsort(torch.cat([part.rows for part in parts]))]

    def _through(self, images: Tensor, prompts: Tensor | None, ready: Prepared) -> Tensor:
        """Rows that are alike through the transformer, by native code where there is some for them."""
        if ready.compiled is not None and prompts is None and len(images) <= ready.compiled.most_rows:
            return ready.compiled.run(images)
        transformer = self.twin if ready.rounded and self.twin is not None else self.transformer
        with torch.autocast(images.device.type, ready.half, enabled=ready.half is not None):
            features: Tensor = transformer(images, replace(ready.course, prompts=prompts))
        return features

    def join(self, point: OperatingPoint, like: str, folder: Path) -> None:
        """Run a point too that is as another but for the compiled form that it names, which lies in a folder.

        Raises:
            ModelError: the form cannot be used.
        """
        form = load_form(point.compiled or "", folder, self.transformer)
        self.points[point.name] = replace(self.points[like], compiled=form)

    def reread(self) -> None:
        """Put in force what the folder of tasks holds now; a batch under way ends as it began."""
        if self.roll.changed():
            self.in_force = self.roll.taken().on(self.device)

    def place(self, device: torch.device) -> None:
        """Bring the transformer and the tasks in force to a device; those that come later follow."""
        if self.twin is not None and device != CPU:
            raise ModelError("precision INT8 is computed on cores alone; take such operating points out, or the GPU")
        named = next((name for name, ready in self.points.items() if ready.compiled is not None), None)
        if named is not None and device != CPU:
            raise ModelError(f"operating point {named!r} is compiled for cores; take it out, or the GPU")
        self.device = device
        self.transformer.to(device)
        self.in_force = self.in_force.on(device)

    def facts(self) -> dict[str, Fact]:
        """Its tasks by number, how accurate points are on those that joined, and why files of tasks are left out."""
        return {**task_metadata(self.in_force.names, self.in_force.refused, self.in_force.judged)}


def build(spec: ModelSpec) -> Built:
    """Build the transformer and make every operating point ready."""
    settings = read_parameters(TransformerParameters, spec)
    weights = find_weights(spec.storage_uri, spec.digest)
    random = isinstance(weights, RandomSeed)
    stored = (
        randomly(SHAPES[settings.size], weights.value)
        if isinstance(weights, RandomSeed)
        else load(weights, settings.told)
    )
    _require_images(spec, stored)
    if spec.tasks and all(given.name != TASK_INPUT for given in spec.inputs):
        raise ModelError(
            f"the variant has task {spec.tasks[0].name!r}, but its stage no input {TASK_INPUT!r} to ask for it by"
        )
    proportional = settings.proportional_attention
    points = {point.name: _prepared(point, stored, proportional=proportional) for point in spec.operating_points}
    roll = TaskRegistry(
        stored,
        spec.operating_points,
        mark=_mark(stored, proportional=proportional) if spec.tasks or spec.tasks_folder else "",
        given=[(task.name, None if task.removed else _file(task)) for task in spec.tasks],
        folder=Path(spec.tasks_folder) if spec.tasks_folder else None,
        most_classes=_most_classes(spec),
    )
    _require_trained(spec, roll)
    served = ServedTransformer(stored.transformer, stored.normalisation, points, roll, roll.taken())
    for point in spec.operating_points:
        if point.compiled is not None:
            _take_form(served, point, None if isinstance(weights, RandomSeed) else weights.parent, spec.max_batch_size)
    if any(ready.rounded for ready in points.values()):
        served.twin = quantize(stored.transformer)
    return Built(served, "random" if random else "stored")


def _require_trained(spec: ModelSpec, roll: TaskRegistry) -> None:
    """Refuse a point whose prompts no task has; where tasks come while it runs, say that none has them yet."""
    for point in spec.operating_points:
        try:
            require_trained(point, roll.ways)
        except ModelError as error:
            if not spec.tasks_folder:
                raise
            log.warning("%s; until a task comes that has it, all run there with their plain heads", error)


def _mark(stored: Checkpoint, *, proportional: bool) -> str:
    """What files of tasks are marked with: the transformer as it is run, not its tensors alone."""
    unusual = {} if proportional else {"proportional_attention": False}
    return fingerprint(stored.transformer, {**stored.settings, **unusual})


def _file(task: Task) -> Path:
    found = find_weights(task.storage_uri, task.digest, FetchLimits(max_bytes=MAX_TASK_FILE_BYTES))
    if isinstance(found, RandomSeed):
        raise ModelError(f"task {task.name!r}: random weights are no task; `trimtab train-task` writes a file")
    return found


def _most_classes(spec: ModelSpec) -> int | None:
    """How many logits the stage declares, where it says so."""
    declared = next((one.shape for one in spec.outputs if one.name == "logits"), ())
    return declared[-1] if declared and declared[-1] > 0 else None


def _prepared(point: OperatingPoint, stored: Checkpoint, *, proportional: bool) -> Prepared:
    where, shape = f"operating point {point.name!r}", stored.transformer.shape
    if point.merging and point.merging.rule and point.merging.rule not in RULES:
        raise ModelError(f"{where}: unknown merging.rule {point.merging.rule!r}; there are: {', '.join(RULES)}")
    try:
        course = course_of(point, shape.depth, proportional=proportional)
    except ValueError as error:
        raise ModelError(f"{where}: merging.schedule: {error}") from error
    beyond = next((count for count in course.merged if count > shape.patches // 2), None)
    if beyond is not None:
        raise ModelError(
            f"{where}: merging.schedule asks for {beyond} tokens in a layer; of {shape.patches} patches no layer "
            f"merges more than {shape.patches // 2}"
        )
    runs = prompt_variant(point)
    half, rounded = HALVES.get(point.precision or "FP32"), point.precision == "INT8"
    return Prepared(course, runs, half, rounded, temperatures=stored.temperatures.get(runs, {}))


def _take_form(served: ServedTransformer, point: OperatingPoint, folder: Path | None, most_rows: int) -> None:
    """Have a point run the compiled form that it names, which lies beside the weights."""
    where, name = f"operating point {point.name!r}", point.compiled or ""
    if not name.startswith(FORM_PREFIX):
        raise ModelError(f"{where}: unknown compiled form {name!r}; `trimtab tune` writes some, as {FORM_PREFIX}…")
    if point.prompts is not None or point.precision == "INT8":
        raise ModelError(f"{where}: there are no compiled forms with prompts or in INT8; take one of the two out")
    if folder is None:
        raise ModelError(f"{where}: compiled forms lie beside weights; random ones lie nowhere")
    try:
        served.join(point, point.name, folder)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error
    compiled = served.points[point.name].compiled
    if compiled is not None and compiled.most_rows < most_rows:
        raise ModelError(
            f"{where}: {name} was compiled for {compiled.most_rows} rows at most, and the variant's maxBatchSize is "
            f"{most_rows}; compile it anew by `trimtab tune`"
        )


def _require_images(spec: ModelSpec, stored: Checkpoint) -> None:
    shape = stored.transformer.shape
    wanted = (shape.channels, shape.side, shape.side)
    given = next((one for one in spec.inputs if one.name == "image"), None)
    if given is None or tuple(given.shape) != wanted:
        found = "none" if given is None else str(list(given.shape))
        raise ModelError(f"family {spec.family!r} reads an input image of shape {list(wanted)}; the stage has {found}")
