"""torchvision's residual networks, from ResNet-18 to ResNet-152: FP32 [B, 3, 224, 224] to logits FP32 [B, 1000].

An operating point may reduce the image's resolution, because all layers but the last are convolutions.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import interpolate
from torchvision import models

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.interfaces import Built, Parameters, read_parameters
from trimtab_model_servers.weights.loading import build_with_weights, fuse_batch_norms
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint

KNOBS = frozenset({"inputSize"})
MIN_RESOLUTION = 32
"""Pixels per side; a residual network halves the resolution five times."""


@dataclass(frozen=True, slots=True)
class Classifier:
    """A residual network for resized and normalized images."""

    network: torch.nn.Module

    def infer(self, inputs: dict[str, torch.Tensor], point: OperatingPoint) -> dict[str, torch.Tensor]:
        """Map `image` [B, 3, 224, 224] to `logits` [B, 1000]; an operating point may resize it first."""
        image = inputs["image"]
        side = point.input_size.resolution if point.input_size else None
        if side is not None and image.shape[-2:] != (side, side):
            image = interpolate(image, (side, side), mode="bilinear", antialias=True)
        return {"logits": self.network(image.contiguous(memory_format=torch.channels_last))}

    def move_to(self, device: torch.device) -> None:
        self.network.to(device)


def build(spec: ModelSpec) -> Built:
    read_parameters(Parameters, spec)
    _require_resolutions(spec)
    construct: Callable[..., torch.nn.Module] = getattr(models, spec.family.rpartition("/")[2])
    network, random = build_with_weights(spec, lambda: construct(weights=None), on_meta=True)
    fuse_batch_norms(network)
    return Built.of(Classifier(network.to(memory_format=torch.channels_last)), random=random)


def _require_resolutions(spec: ModelSpec) -> None:
    for point in spec.operating_points:
        size = point.input_size
        if size is not None and (size.patch is not None or (size.resolution or 0) < MIN_RESOLUTION):
            raise ModelError(
                f"operating point {point.name!r}: inputSize of family {spec.family!r} must be a resolution of "
                f"{MIN_RESOLUTION} pixels or more, without a patch"
            )
