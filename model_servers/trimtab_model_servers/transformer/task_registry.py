"""Registry of active tasks: permanent ones of the weights and the pipeline, and those of a watched folder.

The active tasks are replaced as a whole, so that a batch sees one state. An invalid task file is rejected and reported;
other tasks are not affected.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.transformer.checkpoints import Checkpoint
from trimtab_model_servers.transformer.config import ViTConfig
from trimtab_model_servers.transformer.tasks import PLAIN, Head, TaskBank, fallback_order, prompt_counts, prompt_variant
from trimtab_model_servers.transformer.transformer import VisionTransformer
from trimtab_model_servers.weights.loading import save_half
from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.tasks import (
    MAX_TASK_FILE_BYTES,
    MAX_TASK_NUMBER,
    MAX_TASKS,
    METADATA_KEY,
    TaskRecord,
    UnusableTask,
    parse_file_name,
    parse_task_record,
)

NONE = -1
Heads = Mapping[str, Head]
"""Heads of one task, by prompt variant."""
_Version = tuple[str, int, int]
"""Path, modification time and inode of a file."""


class TaskFile(NamedTuple):
    """Content of a task file."""

    record: TaskRecord
    heads: Mapping[str, Head]
    """By prompt variant."""


def fingerprint(
    transformer: VisionTransformer, settings: Mapping[str, int | float | str] = MappingProxyType({})
) -> str:
    """SHA-256 of a transformer's float16 tensors, in the order of their names, and its unusual settings."""
    digest = hashlib.sha256()
    for name, tensor in sorted(transformer.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.half().contiguous().numpy().tobytes())
    if settings:
        digest.update(json.dumps(settings, sort_keys=True).encode())
    return f"sha256:{digest.hexdigest()}"


def save_task(path: Path, record: TaskRecord, heads: Mapping[str, Head]) -> None:
    tensors = {f"{variant}.{part}": tensor for variant, head in heads.items() for part, tensor in head.parts.items()}
    save_half(path, tensors, {METADATA_KEY: record.model_dump_json(exclude_none=True)})


def load_task(path: Path, shape: ViTConfig, fingerprint: str, prompts: Mapping[str, int]) -> TaskFile:
    """A task's record and heads; ModelError if they do not fit the transformer of this shape and fingerprint."""
    record = _read_record(path)
    if record.transformer != fingerprint:
        raise ModelError(
            f"it was trained on another transformer, or on this one with other parameters ({record.transformer}); "
            f"this one is {fingerprint}"
        )
    shapes = {variant: _part_shapes(shape, len(record.classes), count) for variant, count in prompts.items()}
    tensors = _read_tensors(path, [f"{variant}.{part}" for variant, parts in shapes.items() for part in parts])
    present = {PLAIN, *(name.rpartition(".")[0] for name in tensors)}
    heads = {variant: _head(variant, tensors, parts) for variant, parts in shapes.items() if variant in present}
    return TaskFile(record, heads)


def _read_record(path: Path) -> TaskRecord:
    try:
        if path.stat().st_size > MAX_TASK_FILE_BYTES:
            raise ModelError(f"it is larger than {MAX_TASK_FILE_BYTES // 2**20} MiB, the limit of a task file")
        return parse_task_record(path.read_bytes())
    except (OSError, UnusableTask) as error:
        raise ModelError(str(error)) from error


def _part_shapes(shape: ViTConfig, classes: int, count: int) -> dict[str, tuple[int, ...]]:
    """Expected tensor shapes of a variant with `count` prompts, by part."""
    prompts = {"prompts": (shape.depth, count, shape.width)} if count else {}
    return {"weight": (classes, shape.width), "bias": (classes,)} | prompts


def _read_tensors(path: Path, names: Collection[str]) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            present = set(file.keys())
            return {name: file.get_tensor(name).float() for name in names if name in present}
    except Exception as error:  # an untrusted file may raise anything in torch
        raise ModelError(f"its tensors cannot be read: {type(error).__name__}: {error}") from error


def _head(variant: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> Head:
    parts: dict[str, Tensor] = {}
    for part, shape in shapes.items():
        tensor = tensors.get(f"{variant}.{part}")
        if tensor is None or tuple(tensor.shape) != shape:
            actual = "missing" if tensor is None else str(list(tensor.shape))
            raise ModelError(f"tensor {variant}.{part} must have shape {list(shape)}, but is {actual}")
        if not torch.isfinite(tensor).all():
            raise ModelError(f"tensor {variant}.{part} has non-finite values")
        parts[part] = tensor
    return Head(**parts)


@dataclass(frozen=True, slots=True, eq=False)
class ActiveTasks:
    """Snapshot of the active tasks."""

    names: tuple[str, ...]
    """By number; empty for a number without a task."""
    bank_indices: Tensor
    """int64 [numbers], index of each task's heads in the banks; NONE for a number without a task."""
    banks: Mapping[str, TaskBank]
    """Heads of all tasks, by the prompt variant of a point; the best variant that each task has."""
    rejected: Mapping[str, str]
    """Reasons of rejected files, by name."""
    accuracies: Mapping[str, Mapping[str, Accuracy]]
    """Recorded accuracies of registered tasks, by task and point."""

    def bank_indices_of(self, tasks: Tensor) -> tuple[Tensor, Tensor]:
        """Bank index of each row, and whether its task exists: tasks int64 [B] to int64 [B] and bool [B]."""
        exists = (tasks >= 0) & (tasks < len(self.bank_indices))
        indices = self.bank_indices[tasks.where(exists, 0)]
        exists &= indices != NONE
        return indices.where(exists, 0), exists

    def to(self, device: torch.device) -> "ActiveTasks":
        banks = {variant: bank.to(device) for variant, bank in self.banks.items()}
        return replace(self, bank_indices=self.bank_indices.to(device), banks=banks)

    def by_bank_index(self, of_task: Mapping[str, float], otherwise: float) -> Tensor:
        """Values of tasks by name as a tensor by bank index, [tasks]."""
        numbers = (self.bank_indices != NONE).nonzero().view(-1).tolist()
        return torch.tensor([of_task.get(self.names[number], otherwise) for number in numbers])


class TaskRegistry:
    """Loads tasks and watches a folder; raises ModelError for an invalid task of the pipeline.

    ``fingerprint`` is required of task files. ``pipeline_tasks`` has the names and files of the pipeline's tasks, None
    for a deleted one.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        points: Sequence[OperatingPoint],
        *,
        fingerprint: str = "",
        pipeline_tasks: Sequence[tuple[str, Path | None]] = (),
        folder: Path | None = None,
        max_classes: int | None = None,
    ) -> None:
        self._shape, self._trained = checkpoint.transformer.shape, tuple(checkpoint.heads)
        self._fallbacks = {prompt_variant(point): fallback_order(point) for point in points}
        self._prompts = prompt_counts(points)
        self.fingerprint, self._folder, self._max_classes = fingerprint, folder, max_classes
        self._files_by_version: dict[_Version, TaskFile] = {}
        self._folder_versions: list[_Version] = []
        self._permanent: dict[int, tuple[str, Heads]] = {
            number: (name, {key: by_task[name] for key, by_task in checkpoint.heads.items() if key in self._prompts})
            for number, name in enumerate(checkpoint.tasks)
        }
        self._accuracies: dict[str, Mapping[str, Accuracy]] = {}
        self._numbers = len(checkpoint.tasks) + len(pipeline_tasks)
        for number, (name, path) in enumerate(pipeline_tasks, len(checkpoint.tasks)):
            if path is None:
                continue
            try:
                self._accuracies[name] = self._register(self._permanent, number, name, path)
            except ModelError as error:
                raise ModelError(f"task {name!r} ({path}): {error}") from error

    @property
    def prompt_variants(self) -> Collection[str]:
        return dict.fromkeys((*self._trained, *(key for _, heads in self._permanent.values() for key in heads)))

    def changed(self) -> bool:
        return [_version(path) for path in self._files()] != self._folder_versions

    def snapshot(self) -> ActiveTasks:
        tasks, accuracies, rejected = dict(self._permanent), dict(self._accuracies), {}
        self._files_by_version, previous = {}, self._files_by_version
        files = self._files()
        self._folder_versions = [_version(path) for path in files]
        for path in files:
            number, name = parse_file_name(path.name) or (NONE, "")
            try:
                accuracies[name] = self._register(tasks, number, name, path, previous)
            except ModelError as error:
                rejected[path.stem] = str(error)
        numbers = sorted(tasks)
        bank_indices = torch.full((max(self._numbers, numbers[-1] + 1),), NONE)
        bank_indices[torch.tensor(numbers)] = torch.arange(len(numbers))
        banks = {
            variant: TaskBank([_first(tasks[number][1], fallbacks) for number in numbers])
            for variant, fallbacks in self._fallbacks.items()
        }
        names = tuple(tasks[number][0] if number in tasks else "" for number in range(len(bank_indices)))
        return ActiveTasks(names, bank_indices, banks, rejected, accuracies)

    def _files(self) -> list[Path]:
        if self._folder is None or not self._folder.is_dir():
            return []
        parsed = [(parse_file_name(path.name), path) for path in self._folder.iterdir()]
        return [path for key, path in sorted(parsed, key=lambda entry: entry[0] or (0, "")) if key]

    def _register(
        self,
        tasks: dict[int, tuple[str, Heads]],
        number: int,
        name: str,
        path: Path,
        previous: Mapping[_Version, TaskFile] = MappingProxyType({}),
    ) -> Mapping[str, Accuracy]:
        """Add a task; return its recorded accuracies by point."""
        if name in {registered for registered, _ in tasks.values()}:
            raise ModelError(f"task {name!r} exists already")
        if number in tasks:
            raise ModelError(f"number {number} belongs to task {tasks[number][0]!r}")
        if number > MAX_TASK_NUMBER or len(tasks) == MAX_TASKS:
            raise ModelError(f"there may be at most {MAX_TASKS} tasks, with numbers up to {MAX_TASK_NUMBER}")
        record, heads = self._load(path, previous)
        classes = len(next(iter(heads.values())).bias)
        if self._max_classes is not None and classes > self._max_classes:
            raise ModelError(f"it has {classes} classes; the stage declares at most {self._max_classes}")
        tasks[number] = name, heads
        return record.accuracy_by_point

    def _load(self, path: Path, previous: Mapping[_Version, TaskFile]) -> TaskFile:
        """Load a task file unless it is unchanged."""
        version = _version(path)
        if version in previous:
            task_file = previous[version]
        else:
            task_file = load_task(path, self._shape, self.fingerprint, self._prompts)
        self._files_by_version[version] = task_file
        return task_file


def _first(heads: Heads, variants: Iterable[str]) -> Head:
    return next(heads[variant] for variant in variants if variant in heads)


def _version(path: Path) -> _Version:
    try:
        status = path.stat()
    except OSError:
        return str(path), 0, 0
    return str(path), status.st_mtime_ns, status.st_ino
