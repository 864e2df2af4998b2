"""Checkpoints of vision transformers: native files with tasks, and files of torchvision or timm.

A native file is one safetensors file in float16. Its metadata holds the shape, the tasks with their classes, the
normalisation and the temperatures. Tensors are `transformer.NAME` and `heads.VARIANT.TASK.{weight,bias,prompts}`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import torch
from pydantic import PositiveFloat, TypeAdapter, ValidationError
from torch import Tensor

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.transformer import checkpoint_import
from trimtab_model_servers.transformer.checkpoint_import import UNSPECIFIED, CheckpointInfo
from trimtab_model_servers.transformer.config import Normalisation, ViTConfig
from trimtab_model_servers.transformer.tasks import PLAIN, Head
from trimtab_model_servers.transformer.transformer import VisionTransformer
from trimtab_model_servers.weights.loading import read_file, require_same_tensors, save_half, seeded

KIND = "trimtab-vision-transformer"
ONLY_TASK = "default"
_TEMPERATURES: TypeAdapter[dict[str, dict[str, float]]] = TypeAdapter(dict[str, dict[str, PositiveFloat]])
Heads = Mapping[str, Mapping[str, Head]]
"""By prompt variant and task."""
Temperatures = Mapping[str, Mapping[str, float]]
Settings = Mapping[str, int | float | str]
"""Parameters that change what a transformer computes."""


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A transformer with its tasks."""

    transformer: VisionTransformer
    """Frozen, in evaluation mode."""
    heads: Heads
    """By prompt variant and task; every variant has all tasks."""
    tasks: Mapping[str, tuple[str, ...]]
    """Classes by task, in the order of the tasks' numbers."""
    normalisation: Normalisation
    temperatures: Temperatures = field(default_factory=dict)
    """Divisors of logits for confidences, by prompt variant of the point and task; default 1."""
    settings: Settings = field(default_factory=dict)
    """Parameters that differ from the usual: 64 dimensions per head, epsilon 1e-6, GELU, no normalisation."""


def save(checkpoint: Checkpoint, path: Path, training: Mapping[str, str]) -> None:
    """Write a native file; `training` is added to its metadata."""
    tensors = {f"transformer.{name}": tensor for name, tensor in checkpoint.transformer.state_dict().items()}
    for variant, by_task in checkpoint.heads.items():
        for task, head in by_task.items():
            tensors |= {f"heads.{variant}.{task}.{part}": tensor for part, tensor in head.parts.items()}
    metadata = {
        "kind": KIND,
        "shape": checkpoint.transformer.shape.model_dump_json(by_alias=True),
        "tasks": json.dumps(checkpoint.tasks),
        "normalisation": checkpoint.normalisation,
        "temperatures": json.dumps(checkpoint.temperatures),
    }
    save_half(path, tensors, {**training, **metadata})


def store_temperatures(path: Path, temperatures: Temperatures) -> None:
    metadata, _ = read_file(path)
    save(replace(load(path), temperatures=temperatures), path, metadata)


def load(path: Path, info: CheckpointInfo = UNSPECIFIED) -> Checkpoint:
    """Load a checkpoint; ``info`` states what a foreign file does not contain; ModelError if it is unusable."""
    metadata, tensors = read_file(path)
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    if metadata.get("kind") == KIND:
        return _load_native(path, metadata, tensors)
    converted = checkpoint_import.convert_state_dict(tensors)
    weights, head = checkpoint_import.split_head(converted, str(path))
    shape, normalisation = checkpoint_import.infer_config(converted, str(path), info), info.normalisation or "None"
    tasks = {ONLY_TASK: tuple(str(label) for label in range(len(head.bias)))}
    settings = _unusual_settings(shape, normalisation)
    return Checkpoint(_build(shape, weights, path), {PLAIN: {ONLY_TASK: head}}, tasks, normalisation, settings=settings)


def _unusual_settings(shape: ViTConfig, normalisation: Normalisation) -> Settings:
    """Settings of foreign weights that differ from the usual; fingerprints depend on them."""
    settings = {
        "heads": (shape.heads, max(1, shape.width // 64)),
        "epsilon": (shape.epsilon, 1e-6),
        "activation": (shape.activation, "GELU"),
        "normalisation": (normalisation, "None"),
    }
    return {name: value for name, (value, usual) in settings.items() if value != usual}


def random_checkpoint(shape: ViTConfig, seed: int, classes: int = 1000) -> Checkpoint:
    """Build a transformer with random weights and one task, for latency measurements."""
    with seeded(seed):
        transformer = VisionTransformer(shape).eval().requires_grad_(requires_grad=False)
        head = Head(torch.randn(classes, shape.width) * shape.width**-0.5, torch.zeros(classes))
    labels = tuple(str(label) for label in range(classes))
    return Checkpoint(transformer, {PLAIN: {ONLY_TASK: head}}, {ONLY_TASK: labels}, "None")


def _load_native(path: Path, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Checkpoint:
    try:
        shape = ViTConfig.model_validate_json(metadata["shape"])
        tasks = {str(task): tuple(classes) for task, classes in json.loads(metadata["tasks"]).items()}
        normalisation = next(name for name in get_args(Normalisation) if name == metadata["normalisation"])
        temperatures = _TEMPERATURES.validate_json(metadata.get("temperatures", "{}"))
    except (KeyError, ValueError, ValidationError, AttributeError, StopIteration) as error:
        raise ModelError(f"{path}: invalid metadata ({error})") from error
    weights = {name.partition(".")[2]: value for name, value in tensors.items() if name.startswith("transformer.")}
    return Checkpoint(
        _build(shape, weights, path), _read_heads(path, tensors, tasks), tasks, normalisation, temperatures
    )


def _read_heads(path: Path, tensors: Mapping[str, Tensor], tasks: Mapping[str, tuple[str, ...]]) -> Heads:
    heads: dict[str, dict[str, Head]] = {}
    for name in sorted(tensors):
        if not (name.startswith("heads.") and name.endswith(".weight")):
            continue
        variant, _, task = name.removeprefix("heads.").removesuffix(".weight").rpartition(".")
        stem = f"heads.{variant}.{task}"
        if task not in tasks:
            raise ModelError(f"{path}: {name} belongs to no task; tasks: {', '.join(tasks)}")
        bias = tensors.get(f"{stem}.bias")
        if bias is None or tensors[name].shape[0] != len(tasks[task]) or bias.shape != tensors[name].shape[:1]:
            raise ModelError(f"{path}: {stem} must have a weight and a bias for each of {len(tasks[task])} classes")
        heads.setdefault(variant, {})[task] = Head(tensors[name], bias, tensors.get(f"{stem}.prompts"))
    for variant, by_task in heads.items():
        missing = [task for task in tasks if task not in by_task]
        if missing:
            raise ModelError(f"{path}: task {missing[0]!r} has no head for {variant!r}, but other tasks have one")
    if PLAIN not in heads:
        raise ModelError(f"{path}: no task has a head for {PLAIN!r}")
    return heads


def _build(shape: ViTConfig, tensors: Mapping[str, Tensor], path: Path) -> VisionTransformer:
    with torch.device("meta"):
        transformer = VisionTransformer(shape)
    require_same_tensors(path, transformer.state_dict(), tensors)
    transformer.load_state_dict(dict(tensors), assign=True)
    return transformer.eval().requires_grad_(requires_grad=False)
