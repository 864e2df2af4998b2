"""A task as a file of its own: its head and prompts for every way the transformer runs, and its card."""

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
    """What a task's file holds."""

    record: TaskRecord
    heads: Mapping[str, Head]
    """By way to run."""


def fingerprint(
    transformer: VisionTransformer, settings: Mapping[str, int | float | str] = MappingProxyType({})
) -> str:
    """What tells a transformer from any other: a SHA-256.

    Args:
        transformer: its tensors count in float16, in the order of their names.
        settings: unusual ones that change what it computes; without any the tensors alone count.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(transformer.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.half().contiguous().numpy().tobytes())
    if settings:
        digest.update(json.dumps(settings, sort_keys=True).encode())
    return f"sha256:{digest.hexdigest()}"


def save_task(path: Path, record: TaskRecord, heads: Mapping[str, Head]) -> None:
    """Write a task's file, in float16.

    Args:
        path: the file.
        card: what it tells of itself.
        heads: by way to run.
    """
    tensors: dict[str, Tensor] = {}
    for way, head in heads.items():
        parts = {"weight": head.weight, "bias": head.bias, "prompts": head.prompts}
        tensors |= {f"{way}.{part}": one.half().contiguous() for part, one in parts.items() if one is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={METADATA_KEY: record.model_dump_json(exclude_none=True)})


def load_task(path: Path, shape: ViTConfig, mark: str, prompts: Mapping[str, int]) -> TaskFile:
    """Read a task: its card, and its heads by way to run, the plain one and those of the other ways that it has.

    Args:
        path: its file.
        shape: of the transformer that it joins.
        mark: the fingerprint of that transformer.
        prompts: in each layer, by the ways that are of use.

    Raises:
        ModelError: it does not fit; the message says what would.
    """
    card = _card(path)
    if card.transformer != mark:
        raise ModelError(
            f"it was trained on another transformer, or on this one with other parameters ({card.transformer}); "
            f"this one is {mark}"
        )
    shapes = {way: _shapes(shape, len(card.classes), count) for way, count in prompts.items()}
    tensors = _tensors(path, [f"{way}.{part}" for way, parts in shapes.items() for part in parts])
    there = {PLAIN, *(name.rpartition(".")[0] for name in tensors)}
    return TaskFile(card, {way: _head(way, tensors, parts) for way, parts in shapes.items() if way in there})


def _card(path: Path) -> TaskRecord:
    try:
        if path.stat().st_size > MAX_TASK_FILE_BYTES:
            raise ModelError(f"it is larger than {MAX_TASK_FILE_BYTES // 2**20} MiB, which no task's file may be")
        return parse_task_record(path.read_bytes())
    except (OSError, UnusableTask) as error:
        raise ModelError(str(error)) from error


def _shapes(shape: ViTConfig, classes: int, count: int) -> dict[str, tuple[int, ...]]:
    """The shapes that a task's tensors must have for a way with so many prompts, by part."""
    prompts = {"prompts": (shape.depth, count, shape.width)} if count else {}
    return {"weight": (classes, shape.width), "bias": (classes,)} | prompts


def _tensors(path: Path, names: Collection[str]) -> dict[str, Tensor]:
    """Read those of the named tensors that a file has, as float32; what else it holds is nobody's concern."""
    try:
        with safe_open(path, framework="pt") as file:
            there = set(file.keys())
            return {name: file.get_tensor(name).float() for name in names if name in there}
    except Exception as error:  # a stranger's file: types and sizes that torch does not take raise anything
        raise ModelError(f"its tensors cannot be read: {type(error).__name__}: {error}") from error


def _head(way: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> Head:
    found: dict[str, Tensor] = {}
    for part, shape in shapes.items():
        tensor = tensors.get(f"{way}.{part}")
        if tensor is None or tuple(tensor.shape) != shape:
            given = "none" if tensor is None else str(list(tensor.shape))
            raise ModelError(f"tensor {way}.{part} must have shape {list(shape)}, but is {given}")
        if not torch.isfinite(tensor).all():
            raise ModelError(f"tensor {way}.{part} has numbers that are not finite")
        found[part] = tensor
    return Head(found["weight"], found["bias"], found.get("prompts"))
