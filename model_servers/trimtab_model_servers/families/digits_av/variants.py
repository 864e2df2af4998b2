"""The variants: their names, their shapes, and how weights on disk become a network that serves.

A weights file is one safetensors file in float16 whose metadata says what to build: family and configuration as JSON.
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


HEARD: Final = "heard"
"""The metadata that names the speakers weights have learned from, as a JSON list."""
SOURCE: Final = "source"
"""The metadata that names the file of their recordings; empty for none."""


class WeightsError(ValueError):
    """A weights file that cannot become a network; the message names the file and what is wrong with it."""


def build(config: EarlyConfig | LateConfig, *, seed: int) -> Network:
    """Make a network with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return EarlyNetwork(config) if isinstance(config, EarlyConfig) else LateNetwork(config)


def for_serving(network: Network) -> Network:
    """Switch to evaluation and freeze, in place."""
    return network.eval().requires_grad_(requires_grad=False)


def save(network: Network, path: Path, training: dict[str, str] | None = None) -> None:
    """Write a network as float16, with what is needed to build it again and `training` as it stands."""
    family = "digits-av-early" if isinstance(network, EarlyNetwork) else "digits-av-late"
    tensors = {name: tensor.half().contiguous() for name, tensor in network.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    described = {"family": family, "config": network.config.model_dump_json()}
    save_file(tensors, path, metadata={**(training or {}), **described})


def speakers_of(path: Path) -> tuple[str, ...]:
    """The speakers that weights have learned from; none where from synthesised voices alone.

    Raises:
        WeightsError: the file does not say.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return tuple(map(str, json.loads((file.metadata() or {})[HEARD])))
    except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise WeightsError(f"{path} does not say whose recordings it has learned from: {error!r}") from error


def load(path: Path) -> Network:
    """Read a network that serves: float32, in evaluation mode.

    Raises:
        FileNotFoundError: there is no such file.
        WeightsError: it is no safetensors file, or not one of these networks.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}: `make models` trains them anew")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118  (no mapping)
        family = metadata.get("family")
        if family not in _FAMILIES:
            raise WeightsError(f"{path}: these are weights of {family!r}; should be one of {', '.join(_FAMILIES)}")
        network = for_serving(build(_FAMILIES[family].model_validate_json(metadata["config"]), seed=0))
        network.load_state_dict(tensors)
    except (SafetensorError, ValidationError, KeyError, RuntimeError, json.JSONDecodeError) as error:
        raise WeightsError(f"cannot use the weights in {path}: {error}") from error
    return network
