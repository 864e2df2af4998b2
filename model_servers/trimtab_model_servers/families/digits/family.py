"""Families `digits/locator` and `digits/reader` of the digits pipeline: variants, weight files and settings.

A weight file is one safetensors file in float16; its metadata holds the family and the configuration as JSON.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Final, TypeVar

from pydantic import Field
from torch import channels_last

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.digits import Calibration
from trimtab_model_servers.families.digits.locator import Locator, LocatorConfig
from trimtab_model_servers.families.digits.reader import Reader, ReaderConfig
from trimtab_model_servers.families.interfaces import Built, Parameters, read_parameters
from trimtab_model_servers.weights.loading import fuse_batch_norms, load_configured, save_half, seeded
from trimtab_model_servers.weights.source import RandomSeed, find_weights
from trimtab_pipelines.model_spec import ModelSpec

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
_CLASSES = {"digits/locator": Locator, "digits/reader": Reader}
_CONFIGS: Final[dict[str, type[LocatorConfig] | type[ReaderConfig]]] = {
    "digits-locate": LocatorConfig,
    "digits-read": ReaderConfig,
}


class DigitsParameters(Parameters):
    """Settings of the families."""

    variant: str | None = Field(default=None, description="Network with random weights; default is the variant's name")
    confidence_offset: float = Field(default=0.0, description="Calibration: added to the logit of the raw confidence")
    confidence_slope: float = Field(default=1.0, gt=0, description="Calibration: factor of this logit")


def build_network(variant: str | Config, *, seed: int | None = None) -> Locator | Reader:
    """Build a network with random weights; raises ModelError for an unknown variant."""
    if isinstance(variant, str) and variant not in VARIANTS:
        raise ModelError(f"unknown variant {variant!r}: expected one of {', '.join(VARIANTS)}")
    config = VARIANTS[variant] if isinstance(variant, str) else variant
    with nullcontext() if seed is None else seeded(seed):
        network: Locator | Reader = Locator(config) if isinstance(config, LocatorConfig) else Reader(config)
    return network.to(memory_format=channels_last)


def prepare_for_serving(network: Network) -> Network:
    """Merge normalisations, switch to evaluation and freeze, in place."""
    fuse_batch_norms(network)
    network.eval().requires_grad_(requires_grad=False)
    return network


def save(network: Locator | Reader, config: Config, path: Path, training: dict[str, str] | None = None) -> None:
    family = "locate" if isinstance(config, LocatorConfig) else "read"
    metadata = {"family": f"digits-{family}", "config": config.model_dump_json()}
    save_half(path, network.state_dict(), {**(training or {}), **metadata})


def load(path: Path) -> Locator | Reader:
    """Load a network as float32, fused, in evaluation mode; raises ModelError if the file is none of theirs."""
    return load_configured(path, _CONFIGS, lambda config: prepare_for_serving(build_network(config, seed=0)))


def build(spec: ModelSpec) -> Built:
    parameters = read_parameters(DigitsParameters, spec)
    weights = find_weights(spec.storage_uri, spec.digest)
    if isinstance(weights, RandomSeed):
        network = prepare_for_serving(build_network(parameters.variant or spec.name, seed=weights.value))
    else:
        network = load(weights)
    network.calibration = Calibration(parameters.confidence_offset, parameters.confidence_slope)
    network_class = _CLASSES[spec.family]
    if not isinstance(network, network_class):
        raise ModelError(
            f"{spec.storage_uri}: these weights are of a {type(network).__name__.lower()}, "
            f"but family {spec.family!r} is a {network_class.__name__.lower()}"
        )
    return Built.of(network, random=isinstance(weights, RandomSeed))
