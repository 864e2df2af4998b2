"""Normalisation of image pixels before the transformer."""

from collections.abc import Mapping
from typing import Final, Literal

import torch
from torch import Tensor

Normalisation = Literal["None", "Image", "ImageNet", "Half", "CLIP"]
"""None: done by the caller. Image: by the mean and deviation of each image. Others: by fixed values."""
FIXED: Final[Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]] = {
    "ImageNet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "Half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "CLIP": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}
"""Mean and deviation of each channel, as in timm."""
_MIN_DEVIATION = 0.02


def preprocess(images: Tensor, normalisation: Normalisation) -> Tensor:
    """Normalise images [B, C, H, W], uint8 or 0…1."""
    if images.dtype == torch.uint8:
        images = images.float() / 255
    if normalisation == "None":
        return images
    if normalisation == "Image":
        centred = images - images.mean(dim=(1, 2, 3), keepdim=True)
        deviation = centred.square().mean(dim=(1, 2, 3), keepdim=True).sqrt()
        return centred / (deviation + _MIN_DEVIATION)
    mean, deviation = (images.new_tensor(values)[:, None, None] for values in FIXED[normalisation])
    return (images - mean) / deviation
