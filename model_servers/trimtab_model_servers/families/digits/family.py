"""Families `digits/locator` and `digits/reader` of the digits pipeline."""

from dataclasses import dataclass
from typing import Protocol

import torch

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.digits import variants
from trimtab_model_servers.families.digits.locator import Locator
from trimtab_model_servers.families.digits.reader import Reader
from trimtab_model_servers.families.interfaces import Built
from trimtab_model_servers.weights.source import RandomSeed, find_weights
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint

_CLASSES = {"digits/locator": Locator, "digits/reader": Reader}


class _Digits(Protocol):
    def infer(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class DigitsNetwork:
    """A network of the digits pipeline; it has one operating point."""

    network: _Digits

    def infer(self, inputs: dict[str, torch.Tensor], point: OperatingPoint) -> dict[str, torch.Tensor]:
        del point
        return self.network.infer(inputs)


def build(spec: ModelSpec) -> Built:
    """Build the network that the weights' metadata describes; random weights take the parameter `variant`."""
    unknown = sorted(spec.parameters.keys() - {"variant"})
    if unknown:
        raise ModelError(f"family {spec.family!r}: unknown parameter {unknown[0]!r}; there is: variant")
    weights = find_weights(spec.storage_uri, spec.digest)
    try:
        if isinstance(weights, RandomSeed):
            variant = str(spec.parameters.get("variant", spec.name))
            network = variants.prepare_for_serving(variants.build(variant, seed=weights.value))
        else:
            network = variants.load(weights)
    except (variants.WeightsError, ValueError) as error:
        raise ModelError(str(error)) from error
    network_class = _CLASSES[spec.family]
    if not isinstance(network, network_class):
        raise ModelError(
            f"{spec.storage_uri}: these weights are of a {type(network).__name__.lower()}, "
            f"but family {spec.family!r} is a {network_class.__name__.lower()}"
        )
    return Built(DigitsNetwork(network), "random" if isinstance(weights, RandomSeed) else "stored")
