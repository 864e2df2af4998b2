"""Task files: heads and prompts of one task for every prompt variant, and its record."""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.transformer.config import ViTConfig
from trimtab_model_servers.transformer.prompt_selection import PLAIN
from trimtab_model_servers.transformer.tasks import Head
from trimtab_model_servers.transformer.transformer import VisionTransformer
from trimtab_pipelines.tasks import MAX_TASK_FILE_BYTES, METADATA_KEY, TaskRecord, UnusableTask, parse_task_record


class TaskFile(NamedTuple):
    """Content of a task file."""

    record: TaskRecord
    heads: Mapping[str, Head]
    """By prompt variant."""


def fingerprint(
    transformer: VisionTransformer, settings: Mapping[str, int | float | str] = MappingProxyType({})
) -> str:
    """SHA-256 that identifies a transformer.

    Args:
        transformer: hashed as float16 tensors, in the order of their names.
        settings: unusual settings that change what it computes.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(transformer.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.half().contiguous().numpy().tobytes())
    if settings:
        digest.update(json.dumps(settings, sort_keys=True).encode())
    return f"sha256:{digest.hexdigest()}"


def save_task(path: Path, record: TaskRecord, heads: Mapping[str, Head]) -> None:
    """Write a task file in float16, with heads by prompt variant."""
    tensors: dict[str, Tensor] = {}
    for variant, head in heads.items():
        parts = {"weight": head.weight, "bias": head.bias, "prompts": head.prompts}
        tensors |= {
            f"{variant}.{part}": tensor.half().contiguous() for part, tensor in parts.items() if tensor is not None
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={METADATA_KEY: record.model_dump_json(exclude_none=True)})


def load_task(path: Path, shape: ViTConfig, fingerprint: str, prompts: Mapping[str, int]) -> TaskFile:
    """Read a task's record and its heads for the given prompt variants.

    Args:
        path: task file.
        shape: of the transformer.
        fingerprint: of the transformer.
        prompts: per layer, by prompt variant.

    Raises:
        ModelError: the file does not match the transformer.
    """
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
    """Read the named tensors that a file has, as float32."""
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
    return Head(parts["weight"], parts["bias"], parts.get("prompts"))
