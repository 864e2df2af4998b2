"""Variants of locators and readers, and their weight files.

A weight file is one safetensors file in float16; its metadata holds the family and the configuration as JSON.
"""

import json
from pathlib import Path
from typing import Final, TypeVar

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trimtab_model_servers.families.digits.layers import fold
from trimtab_model_servers.families.digits.locator import Locator, LocatorConfig
from trimtab_model_servers.families.digits.reader import Reader, ReaderConfig

Config = LocatorConfig | ReaderConfig
Network = TypeVar("Network", bound=Locator | Reader)

VARIANTS: Final[dict[str, Config]] = {
    "locate-xs": LocatorConfig(side=48, widths=(8, 16, 16), blocks=(0, 0, 0), neck=16),
    "locate-s": LocatorConfig(side=96, widths=(8, 16, 32), blocks=(0, 0, 1), neck=24),
    "locate-m": LocatorConfig(side=96, widths=(12, 24, 40), blocks=(0, 1, 2), neck=32),
    "locate-l": LocatorConfig(side=96, widths=(16, 32, 64), blocks=(1, 3, 2), neck=48),
    "locate-xl": LocatorConfig(side=96, widths=(32, 64, 64), blocks=(2, 3, 3), neck=48, views=2),
    "read-xs": ReaderConfig(side=28, widths=(8, 16, 20), blocks=(0, 0, 0), strides=(2, 2, 1)),
    "read-s": ReaderConfig(side=28, widths=(12, 24, 32), blocks=(0, 0, 1), strides=(1, 2, 2)),
    "read-m": ReaderConfig(side=28, widths=(16, 32, 48), blocks=(0, 1, 1), strides=(1, 2, 2)),
    "read-l": ReaderConfig(side=28, widths=(16, 32, 64), blocks=(2, 2, 1), strides=(1, 2, 2)),
    "read-xl": ReaderConfig(side=28, widths=(32, 48, 64), blocks=(2, 2, 1), strides=(1, 2, 2), views=5),
}
"""Lightest first within each stage."""


class WeightsError(ValueError):
    """Unusable weight file."""


def build(variant: str | Config, *, seed: int | None = None) -> Locator | Reader:
    """Build a network with random weights; ValueError for an unknown variant."""
    config = _variant_config(variant) if isinstance(variant, str) else variant
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        network: Locator | Reader = Locator(config) if isinstance(config, LocatorConfig) else Reader(config)
    return network.to(memory_format=torch.channels_last)


def prepare_for_serving(network: Network) -> Network:
    """Merge normalisations, switch to evaluation and freeze, in place."""
    fold(network)
    network.eval().requires_grad_(requires_grad=False)
    return network


def save(network: Locator | Reader, config: Config, path: Path, training: dict[str, str] | None = None) -> None:
    """Write a folded network as float16; `training` is added to its metadata."""
    family = "locate" if isinstance(config, LocatorConfig) else "read"
    tensors = {name: tensor.half().contiguous() for name, tensor in network.state_dict().items()}
    metadata = {"family": f"digits-{family}", "config": config.model_dump_json()}
    save_file(tensors, path, metadata={**(training or {}), **metadata})


def load(path: Path) -> Locator | Reader:
    """Load a network as float32, folded, in evaluation mode.

    Raises:
        FileNotFoundError: the file is missing.
        WeightsError: the file is no weight file of these networks.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}; train them with trimtab_training.digits.train")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118  (no mapping)
        config = _read_config(metadata)
        network = prepare_for_serving(build(config, seed=0))
        network.load_state_dict(tensors)
    except (SafetensorError, ValidationError, KeyError, RuntimeError, json.JSONDecodeError) as error:
        raise WeightsError(f"cannot use the weights in {path}: {error}") from error
    return network


def _read_config(metadata: dict[str, str]) -> Config:
    family = metadata.get("family")
    if family == "digits-locate":
        return LocatorConfig.model_validate_json(metadata["config"])
    if family == "digits-read":
        return ReaderConfig.model_validate_json(metadata["config"])
    raise KeyError(f"family {family!r} in the metadata; expected 'digits-locate' or 'digits-read'")


def _variant_config(variant: str) -> Config:
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}: expected one of {', '.join(VARIANTS)}")
    return VARIANTS[variant]
