"""Variants of digits-av networks, and their weight files.

A weight file is one safetensors file in float16; its metadata holds the family and the configuration as JSON.
"""

import json
from pathlib import Path
from typing import Final

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trimtab_model_servers.families.digits_av.early_fusion import EarlyConfig, EarlyNetwork
from trimtab_model_servers.families.digits_av.late_fusion import LateConfig, LateNetwork

Network = EarlyNetwork | LateNetwork

VARIANTS: Final[dict[str, EarlyConfig | LateConfig]] = {"late": LateConfig(), "early": EarlyConfig()}
_FAMILIES: Final[dict[str, type[EarlyConfig] | type[LateConfig]]] = {
    "digits-av-early": EarlyConfig,
    "digits-av-late": LateConfig,
}
SPEAKERS_KEY: Final = "heard"
"""Metadata key of the training speakers, a JSON list."""
RECORDINGS_KEY: Final = "source"
"""Metadata key of the recordings' file; empty for synthesised voices only."""


class WeightsError(ValueError):
    """Unusable weight file."""


def build(config: EarlyConfig | LateConfig, *, seed: int) -> Network:
    """Build a network with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return EarlyNetwork(config) if isinstance(config, EarlyConfig) else LateNetwork(config)


def prepare_for_serving(network: Network) -> Network:
    """Switch to evaluation and freeze, in place."""
    return network.eval().requires_grad_(requires_grad=False)


def save(network: Network, path: Path, training: dict[str, str] | None = None) -> None:
    """Write a network as float16; `training` is added to its metadata."""
    family = "digits-av-early" if isinstance(network, EarlyNetwork) else "digits-av-late"
    tensors = {name: tensor.half().contiguous() for name, tensor in network.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"family": family, "config": network.config.model_dump_json()}
    save_file(tensors, path, metadata={**(training or {}), **metadata})


def speakers_of(path: Path) -> tuple[str, ...]:
    """Speakers that weights were trained on; none for synthesised voices.

    Raises:
        WeightsError: the metadata lacks them.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return tuple(map(str, json.loads((file.metadata() or {})[SPEAKERS_KEY])))
    except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise WeightsError(f"{path}: its metadata lacks the training speakers: {error!r}") from error


def load(path: Path) -> Network:
    """Load a network as float32, in evaluation mode.

    Raises:
        FileNotFoundError: the file is missing.
        WeightsError: the file is no weight file of these networks.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}; train them with trimtab_training.digits_av.train")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118  (no mapping)
        family = metadata.get("family")
        if family not in _FAMILIES:
            raise WeightsError(f"{path}: weights of family {family!r}; expected one of {', '.join(_FAMILIES)}")
        network = prepare_for_serving(build(_FAMILIES[family].model_validate_json(metadata["config"]), seed=0))
        network.load_state_dict(tensors)
    except (SafetensorError, ValidationError, KeyError, RuntimeError, json.JSONDecodeError) as error:
        raise WeightsError(f"cannot use the weights in {path}: {error}") from error
    return network
