"""What happens to the pixels of an image before a transformer sees them."""

from typing import Literal

import torch
from torch import Tensor

Normalisation = Literal["None", "Image", "ImageNet", "Half"]
"""None: the caller has done it. Image: each image by its own mean and deviation. ImageNet, Half: by fixed ones."""
_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
_LEAST_DEVIATION = 0.02


def prepared(images: Tensor, normalisation: Normalisation) -> Tensor:
    """Map images [B, C, H, W], bytes or numbers in 0…1, to what the transformer was trained on."""
    if images.dtype == torch.uint8:
        images = images.float() / 255
    if normalisation == "None":
        return images
    if normalisation == "Image":
        centred = images - images.mean(dim=(1, 2, 3), keepdim=True)
        deviation = centred.square().mean(dim=(1, 2, 3), keepdim=True).sqrt()
        return centred / (deviation + _LEAST_DEVIATION)
    mean, deviation = (images.new_tensor(values)[:, None, None] for values in _fixed(normalisation))
    return (images - mean) / deviation


def _fixed(normalisation: Normalisation) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return _IMAGENET if normalisation == "ImageNet" else _HALF
