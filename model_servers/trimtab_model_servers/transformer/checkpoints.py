"""Transformers on disk: our own files, which hold the tasks too, and those that torchvision or timm wrote.

A file of ours is one safetensors file in float16. Its metadata tell what to build: the shape, the tasks with their
classes, how images are normalised, and what makes logits a confidence. Tensors are `transformer.NAME` and
`heads.WAY.TASK.{weight,bias,prompts}`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import torch
from pydantic import PositiveFloat, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.transformer.checkpoint_import import (
    UNSPECIFIED,
    CheckpointInfo,
    convert_state_dict,
    infer_config,
    split_head,
)
from trimtab_model_servers.transformer.config import ViTConfig
from trimtab_model_servers.transformer.image_preprocessing import Normalisation
from trimtab_model_servers.transformer.prompt_selection import PLAIN
from trimtab_model_servers.transformer.tasks import Head
from trimtab_model_servers.transformer.transformer import VisionTransformer
from trimtab_model_servers.weights import require_same_tensors

KIND = "trimtab-vision-transformer"
ONLY_TASK = "default"
_TEMPERATURES: TypeAdapter[dict[str, dict[str, float]]] = TypeAdapter(dict[str, dict[str, PositiveFloat]])
Heads = Mapping[str, Mapping[str, Head]]
"""By way to run, then by task."""
Temperatures = Mapping[str, Mapping[str, float]]
Settings = Mapping[str, int | float | str]
"""Parameters that change what a transformer computes, by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A transformer with its tasks.

    Attributes:
        transformer: frozen, in evaluation.
        heads: by way to run, then by task; every way has all tasks.
        tasks: classes by name, in the order of the tasks' numbers.
        normalisation: of images.
        temperatures: that logits are divided by before they are a confidence, by what a point does (`ways.way`), then
            by task; 1 where none stands.
        settings: what its file does not tell and changes what it computes, by parameter, where it is not the usual:
            64 numbers a head, an epsilon of 1e-6, GELU, no normalisation.
    """

    transformer: VisionTransformer
    heads: Heads
    tasks: Mapping[str, tuple[str, ...]]
    normalisation: Normalisation
    temperatures: Temperatures = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)


def save(stored: Checkpoint, path: Path, training: Mapping[str, str]) -> None:
    """Write a file of ours, with `training` among its metadata as it stands."""
    tensors = {f"transformer.{name}": tensor for name, tensor in stored.transformer.state_dict().items()}
    for way, by_task in stored.heads.items():
        for task, head in by_task.items():
            parts = {"weight": head.weight, "bias": head.bias, "prompts": head.prompts}
            tensors |= {f"heads.{way}.{task}.{part}": value for part, value in parts.items() if value is not None}
    described = {
        "kind": KIND,
        "shape": stored.transformer.shape.model_dump_json(by_alias=True),
        "tasks": json.dumps(stored.tasks),
        "normalisation": stored.normalisation,
        "temperatures": json.dumps(stored.temperatures),
    }
    halved = {name: tensor.half().contiguous() for name, tensor in tensors.items()}
    save_file(halved, path, metadata={**training, **described})


def store_temperatures(path: Path, temperatures: Temperatures) -> None:
    """Write a file of ours anew, all the same but for its temperatures."""
    metadata, _ = _read(path)
    save(replace(load(path), temperatures=temperatures), path, metadata)


def load(path: Path, told: CheckpointInfo = UNSPECIFIED) -> Checkpoint:
    """Read a transformer, whoever wrote it.

    Args:
        path: a safetensors file of ours, of torchvision or of timm.
        told: what the file does not tell, where it is not ours; images are not normalised unless it says so.

    Raises:
        ModelError: naming the file and what is wrong with it.
    """
    metadata, tensors = _read(path)
    if metadata.get("kind") == KIND:
        return _ours(path, metadata, tensors)
    named = convert_state_dict(tensors)
    own, head = split_head(named, str(path))
    shape, normalisation = infer_config(named, str(path), told), told.normalisation or "None"
    tasks = {ONLY_TASK: tuple(str(label) for label in range(len(head.bias)))}
    settings = _unusual(shape, normalisation)
    return Checkpoint(_filled(shape, own, path), {PLAIN: {ONLY_TASK: head}}, tasks, normalisation, settings=settings)


def _unusual(shape: ViTConfig, normalisation: Normalisation) -> Settings:
    """The settings of foreign weights that are not the usual; files of tasks are marked by them, so that this stays."""
    settings = {
        "heads": (shape.heads, max(1, shape.width // 64)),
        "epsilon": (shape.epsilon, 1e-6),
        "activation": (shape.activation, "GELU"),
        "normalisation": (normalisation, "None"),
    }
    return {name: found for name, (found, usual) in settings.items() if found != usual}


def random_checkpoint(shape: ViTConfig, seed: int, classes: int = 1000) -> Checkpoint:
    """Make a transformer of random weights with one task, for measuring latency."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = VisionTransformer(shape).eval().requires_grad_(requires_grad=False)
        head = Head(torch.randn(classes, shape.width) * shape.width**-0.5, torch.zeros(classes))
    labels = tuple(str(label) for label in range(classes))
    return Checkpoint(transformer, {PLAIN: {ONLY_TASK: head}}, {ONLY_TASK: labels}, "None")


def _ours(path: Path, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Checkpoint:
    try:
        shape = ViTConfig.model_validate_json(metadata["shape"])
        tasks = {str(task): tuple(classes) for task, classes in json.loads(metadata["tasks"]).items()}
        normalisation = next(one for one in get_args(Normalisation) if one == metadata["normalisation"])
        temperatures = _TEMPERATURES.validate_json(metadata.get("temperatures", "{}"))
    except (KeyError, ValueError, ValidationError, AttributeError, StopIteration) as error:
        raise ModelError(
            f"{path}: its metadata do not tell what to build ({error}); `make models` writes it"
        ) from error
    own = {name.partition(".")[2]: value for name, value in tensors.items() if name.startswith("transformer.")}
    return Checkpoint(_filled(shape, own, path), _heads(path, tensors, tasks), tasks, normalisation, temperatures)


def _heads(path: Path, tensors: Mapping[str, Tensor], tasks: Mapping[str, tuple[str, ...]]) -> Heads:
    found: dict[str, dict[str, Head]] = {}
    for name in sorted(tensors):
        if not (name.startswith("heads.") and name.endswith(".weight")):
            continue
        way, _, task = name.removeprefix("heads.").removesuffix(".weight").rpartition(".")
        stem = f"heads.{way}.{task}"
        if task not in tasks:
            raise ModelError(f"{path}: {name} belongs to no task; there are: {', '.join(tasks)}")
        bias = tensors.get(f"{stem}.bias")
        if bias is None or tensors[name].shape[0] != len(tasks[task]) or bias.shape != tensors[name].shape[:1]:
            raise ModelError(f"{path}: {stem} must have a weight and a bias for each of {len(tasks[task])} classes")
        found.setdefault(way, {})[task] = Head(tensors[name], bias, tensors.get(f"{stem}.prompts"))
    for way, by_task in found.items():
        missing = [task for task in tasks if task not in by_task]
        if missing:
            raise ModelError(f"{path}: task {missing[0]!r} has no head for {way!r}, but others have one")
    if PLAIN not in found:
        raise ModelError(f"{path}: no task has a head for {PLAIN!r}, which runs without prompts and merging")
    return found


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118  (no mapping)
            return file.metadata() or {}, tensors
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not a whole safetensors file ({error}); fetch or write it anew") from error


def _filled(shape: ViTConfig, tensors: Mapping[str, Tensor], path: Path) -> VisionTransformer:
    with torch.device("meta"):
        transformer = VisionTransformer(shape)
    require_same_tensors(path, transformer.state_dict(), tensors)
    transformer.load_state_dict(dict(tensors), assign=True)
    return transformer.eval().requires_grad_(requires_grad=False)
