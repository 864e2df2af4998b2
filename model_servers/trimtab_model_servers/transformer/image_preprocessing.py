"""What happens to the pixels of an image before a transformer sees them."""

from collections.abc import Mapping
from typing import Final, Literal

import torch
from torch import Tensor

Normalisation = Literal["None", "Image", "ImageNet", "Half", "CLIP"]
"""None: the caller has done it. Image: each image by its own mean and deviation. The others: by fixed ones."""
FIXED: Final[Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]] = {
    "ImageNet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "Half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "CLIP": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}
"""Mean and deviation of each channel, as timm has them of the weights it offers."""
_LEAST_DEVIATION = 0.02


def preprocess(images: Tensor, normalisation: Normalisation) -> Tensor:
    """Map images [B, C, H, W], bytes or numbers in 0…1, to what the transformer was trained on."""
    if images.dtype == torch.uint8:
        images = images.float() / 255
    if normalisation == "None":
        return images
    if normalisation == "Image":
        centred = images - images.mean(dim=(1, 2, 3), keepdim=True)
        deviation = centred.square().mean(dim=(1, 2, 3), keepdim=True).sqrt()
        return centred / (deviation + _LEAST_DEVIATION)
    mean, deviation = (images.new_tensor(values)[:, None, None] for values in FIXED[normalisation])
    return (images - mean) / deviation
