"""Families `digits-av/early` and `digits-av/late`: networks that classify a digit from audio, video and text.

A weight file is one safetensors file in float16; its metadata holds the family and the configuration as JSON.
"""

import json
from pathlib import Path
from typing import Final

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.digits_av.early_fusion import EarlyConfig, EarlyNetwork
from trimtab_model_servers.families.digits_av.late_fusion import LateConfig, LateNetwork
from trimtab_model_servers.families.interfaces import Built, Parameters, read_parameters
from trimtab_model_servers.weights.loading import load_configured, read_file, save_half, seeded
from trimtab_model_servers.weights.source import RandomSeed, find_weights
from trimtab_pipelines.model_spec import ModelSpec

Network = EarlyNetwork | LateNetwork

KNOBS = frozenset({"modalities"})
VARIANTS: Final[dict[str, EarlyConfig | LateConfig]] = {"late": LateConfig(), "early": EarlyConfig()}
_FAMILIES: Final[dict[str, type[EarlyConfig] | type[LateConfig]]] = {
    "digits-av-early": EarlyConfig,
    "digits-av-late": LateConfig,
}
SPEAKERS_KEY: Final = "heard"
"""Metadata key of the training speakers, a JSON list."""
RECORDINGS_KEY: Final = "source"
"""Metadata key of the recordings' file; empty for synthesised voices only."""


def build_network(config: EarlyConfig | LateConfig, *, seed: int) -> Network:
    with seeded(seed):
        return EarlyNetwork(config) if isinstance(config, EarlyConfig) else LateNetwork(config)


def prepare_for_serving(network: Network) -> Network:
    return network.eval().requires_grad_(requires_grad=False)


def save(network: Network, path: Path, training: dict[str, str] | None = None) -> None:
    family = "digits-av-early" if isinstance(network, EarlyNetwork) else "digits-av-late"
    metadata = {"family": family, "config": network.config.model_dump_json()}
    save_half(path, network.state_dict(), {**(training or {}), **metadata})


def speakers_of(path: Path) -> tuple[str, ...]:
    """Speakers that weights were trained on; none for synthesised voices; ModelError if the metadata lacks them."""
    metadata, _ = read_file(path)
    try:
        return tuple(map(str, json.loads(metadata[SPEAKERS_KEY])))
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: its metadata lacks the training speakers: {error!r}") from error


def load(path: Path) -> Network:
    """Load a network as float32, in evaluation mode; raises ModelError if the file is none of theirs."""
    return load_configured(path, _FAMILIES, lambda config: prepare_for_serving(build_network(config, seed=0)))


def build(spec: ModelSpec) -> Built:
    read_parameters(Parameters, spec)
    config = VARIANTS[spec.family.rpartition("/")[2]]
    weights = find_weights(spec.storage_uri, spec.digest)
    if isinstance(weights, RandomSeed):
        network = prepare_for_serving(build_network(config, seed=weights.value))
    else:
        network = load(weights)
    if not isinstance(network.config, type(config)):
        raise ModelError(f"{spec.storage_uri}: these weights are not of family {spec.family!r}")
    return Built.of(network, random=isinstance(weights, RandomSeed))
