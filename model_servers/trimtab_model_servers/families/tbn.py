"""TBN (Kazakos et al., ICCV 2019): a BN-Inception each for RGB, optical flow and audio, fused per segment.

Inputs are `image` UINT8 [B, 3, 3, 224, 224], a frame per segment, `flow` UINT8 [B, 3, 10, 224, 224], five steps of
horizontal and vertical flow, and `audio` FP32 [B, 3, 1, 256, 256], log spectrograms; outputs are `label` (verb), `noun`
and the verb's `confidence`. Late fusion: for an absent modality, the encoder and its columns of the fusion layer are
skipped, which equals features of zero; the weights must be trained with modality dropout.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor, nn

from trimtab_model_servers.families.bn_inception import FEATURES, BnInception
from trimtab_model_servers.families.interfaces import Built
from trimtab_model_servers.families.modality_inputs import classify, select_inputs
from trimtab_model_servers.families.parameters import Parameters, read_parameters
from trimtab_model_servers.weights import build_with_weights
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint

KNOBS = frozenset({"modalities"})
CHANNELS = {"image": 3, "flow": 10, "audio": 1}
MODALITIES = tuple(CHANNELS)
FUSED = 512


class TbnParameters(Parameters):
    """Settings of the family; the defaults are those of the paper, for EPIC-Kitchens."""

    verbs: int = Field(default=125, ge=2, le=10_000)
    nouns: int = Field(default=352, ge=2, le=10_000)


class Tbn(nn.Module):
    """Three encoders, a fusion layer, and two heads."""

    def __init__(self, size: TbnParameters) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict({name: BnInception(channels) for name, channels in CHANNELS.items()})
        self.fusion = nn.Linear(len(CHANNELS) * FEATURES, FUSED)
        self.verb = nn.Linear(FUSED, size.verbs)
        self.noun = nn.Linear(FUSED, size.nouns)

    def forward(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Score verbs and nouns from the given modalities, [B, verbs] and [B, nouns], averaged over segments."""
        return self.fuse({name: self.encode(name, tensor) for name, tensor in inputs.items()})

    def encode(self, name: str, tensor: Tensor) -> Tensor:
        """Map segments [B, S, channels, H, W] of a modality to features [B, S, 1024]."""
        rows, segments = tensor.shape[:2]
        images = tensor.flatten(0, 1).to(torch.float32)
        if tensor.dtype == torch.uint8:
            images = images.sub_(110.0)
        features: Tensor = self.encoders[name](images)
        return features.view(rows, segments, FEATURES)

    def fuse(self, features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Score features [B, S, 1024] of the given modalities."""
        present = [n for n, name in enumerate(MODALITIES) if name in features]
        columns = self.fusion.weight.view(FUSED, len(MODALITIES), FEATURES)[:, present].flatten(1)
        joined = torch.cat([features[MODALITIES[n]] for n in present], dim=2)
        fused = torch.relu(nn.functional.linear(joined, columns, self.fusion.bias))
        return self.verb(fused).mean(dim=1), self.noun(fused).mean(dim=1)


@dataclass(frozen=True, slots=True)
class TbnNetwork:
    """TBN as served."""

    network: Tbn

    def infer(self, inputs: dict[str, Tensor], point: OperatingPoint) -> dict[str, Tensor]:
        """Compute `label` [B], `confidence` [B] and `noun` [B]."""
        verbs, nouns = self.network(select_inputs(inputs, point, MODALITIES))
        return classify(verbs) | {"noun": nouns.argmax(dim=1)}


def build(spec: ModelSpec) -> Built:
    """Build the model with stored or random weights."""
    parameters = read_parameters(TbnParameters, spec)
    network, random = build_with_weights(spec, lambda: Tbn(parameters))
    return Built.of(TbnNetwork(network), random=random)
