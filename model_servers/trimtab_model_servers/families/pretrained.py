"""Builds transformers models from the architectures of this package, with stored or random weights.

Only the families of such models import this module: importing transformers takes seconds.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.architectures import ARCHITECTURES, Architecture
from trimtab_model_servers.families.transformers_package import TRANSFORMERS
from trimtab_model_servers.weights.loading import read_tensors, seeded
from trimtab_model_servers.weights.source import RandomSeed, find_weights
from trimtab_pipelines.model_spec import ModelSpec

_CLASSES: dict[str, Any] = {
    name: getattr(TRANSFORMERS, name)  # imported now, for a forkserver
    for architecture in ARCHITECTURES.values()
    for name in (architecture.model, architecture.config)
}


def architecture_of(spec: ModelSpec) -> Architecture:
    return ARCHITECTURES[spec.family.rpartition("/")[2]]


def construct(architecture: Architecture, **settings: object) -> Any:
    """Create the model with random weights, or without weights on the meta device."""
    config = _CLASSES[architecture.config](**architecture.settings, **settings)
    return _CLASSES[architecture.model](config).eval()


def build_model(spec: ModelSpec, **settings: object) -> tuple[Any, bool]:
    """A variant's model, and whether its weights are random; ModelError if these are unavailable or do not fit."""
    architecture = architecture_of(spec)
    weights = find_weights(spec.storage_uri, spec.digest)
    if isinstance(weights, RandomSeed):
        with seeded(weights.value):
            model = construct(architecture, **settings)
    else:
        model = load(architecture, weights, settings)
    return model.requires_grad_(requires_grad=False), isinstance(weights, RandomSeed)


def load(architecture: Architecture, path: Path, settings: Mapping[str, object]) -> Any:
    """The model with the tensors of a file, also of older names and tied weights; ModelError if one does not fit."""
    TRANSFORMERS.utils.logging.disable_progress_bar()
    config = _CLASSES[architecture.config](**architecture.settings, **settings)
    model, report = _CLASSES[architecture.model].from_pretrained(
        None,
        config=config,
        state_dict=read_tensors(path),
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    for name, actual, expected in sorted(report["mismatched_keys"]):
        raise ModelError(
            f"{path}: tensor {name!r} has shape {list(actual)}; "
            f"with weights like {architecture.published} it must be {list(expected)}"
        )
    for name in sorted(report["missing_keys"]):
        raise ModelError(f"{path}: tensor {name!r} is missing; are these weights like {architecture.published}?")
    for name in sorted(report["unexpected_keys"]):
        raise ModelError(f"{path}: tensor {name!r} is not part of {architecture.model} like {architecture.published}")
    return model.eval()
