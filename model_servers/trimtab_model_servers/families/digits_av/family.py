"""Families `digits-av/early` and `digits-av/late`: networks that classify a digit from audio, video and text."""

from dataclasses import dataclass

import torch

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.digits_av import MODALITIES, variants
from trimtab_model_servers.families.digits_av.base import MultimodalNetwork
from trimtab_model_servers.families.interfaces import Built
from trimtab_model_servers.weights.source import RandomSeed, find_weights
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint

KNOBS = frozenset({"modalities"})


@dataclass(frozen=True, slots=True)
class DigitsAvNetwork:
    """A network of the digits-av pipeline."""

    network: MultimodalNetwork

    def infer(self, inputs: dict[str, torch.Tensor], point: OperatingPoint) -> dict[str, torch.Tensor]:
        """Classify from the modalities of the point that the batch has; ValueError if it has none of them."""
        modalities = point.modalities or MODALITIES
        return self.network.infer({name: tensor for name, tensor in inputs.items() if name in modalities})


def build(spec: ModelSpec) -> Built:
    """Build the network of the family's name."""
    if spec.parameters:
        raise ModelError(f"family {spec.family!r} has no parameters; remove {', '.join(spec.parameters)}")
    config = variants.VARIANTS[spec.family.rpartition("/")[2]]
    weights = find_weights(spec.storage_uri, spec.digest)
    try:
        if isinstance(weights, RandomSeed):
            network = variants.prepare_for_serving(variants.build(config, seed=weights.value))
        else:
            network = variants.load(weights)
    except (FileNotFoundError, variants.WeightsError) as error:
        raise ModelError(str(error)) from error
    if not isinstance(network.config, type(config)):
        raise ModelError(f"{spec.storage_uri}: these weights are not of family {spec.family!r}")
    return Built(DigitsAvNetwork(network), "random" if isinstance(weights, RandomSeed) else "stored")
