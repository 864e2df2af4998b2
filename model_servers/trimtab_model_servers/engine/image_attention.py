"""Cross-attention mask of a prompt: the image tokens that each position attends to.

The rule is that of Mllama's processor: an image is visible from its placeholder to the next image's; adjacent images
are visible together up to the image after them; the last ones are visible to the end. Text before the first image
attends to every image and its padding, but skips the feed-forward part of the cross-attention layers, as transformers'
own model does. In a slot the tokens of all images come first, in order, and the padding of all of them last, so that
the image tokens visible to a position are one contiguous range.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab_model_servers.engine.request import Image


@dataclass(frozen=True, slots=True, eq=False)
class ImageAttentionMask:
    """For each position of a prompt the range of image tokens that it attends to."""

    low: NDArray[np.int64]
    """[prompt]"""
    high: NDArray[np.int64]
    """[prompt]; 1 if the request has no image."""
    after_image: NDArray[np.bool_]
    """[prompt]; whether the position is at or after an image."""

    def at(self, start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """The columns of ``count`` positions from ``start``; generated tokens attend like the last of the prompt."""
        positions = np.minimum(np.arange(start, start + count), len(self.low) - 1)
        return self.low[positions], self.high[positions], self.after_image[positions]


def image_attention_mask(prompt: int, images: Sequence[Image]) -> ImageAttentionMask:
    low = np.zeros(prompt, dtype=np.int64)
    high = np.full(prompt, max(sum(image.rows for image in images), 1), dtype=np.int64)
    after_image = np.zeros(prompt, dtype=np.bool_)
    group = offset = 0
    for number, image in enumerate(images):
        previous = images[number - 1] if number else None
        if previous is None or previous.start + previous.placeholders != image.start:
            group = offset
        offset += image.tokens
        low[image.start :], high[image.start :], after_image[image.start :] = group, offset, True
    return ImageAttentionMask(low, high, after_image)
