"""Which image tokens each position of a prompt attends to in a model that attends across. Pure.

Mllama's rule, as its processor has it: an image is seen from its placeholder up to the next image's, images that stand
side by side up to the one that follows them all; the last ones to the end. Text before the first image attends to
every image and its padding, but leaves out the feed-forward part of the layers that do (transformers' own model does
so; tokens differ else). In a slot images' tokens come first, in order, and the padding of all of them last, so that
what a position sees is one run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab_model_servers.engine.request import Image


@dataclass(frozen=True, slots=True, eq=False)
class ImageAttentionMask:
    """For each position of a prompt the run of image tokens it attends to, and whether it is at or behind an image.

    Attributes:
        low: int64 [prompt].
        high: int64 [prompt]; 1 where the request has no image at all.
        behind: bool [prompt].
    """

    low: NDArray[np.int64]
    high: NDArray[np.int64]
    behind: NDArray[np.bool_]

    def at(self, start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """The same for ``count`` positions from ``start``; what is written sees what the prompt's last one does."""
        places = np.minimum(np.arange(start, start + count), len(self.low) - 1)
        return self.low[places], self.high[places], self.behind[places]


def image_attention_mask(prompt: int, images: Sequence[Image]) -> ImageAttentionMask:
    """Work out who sees what in a prompt of ``prompt`` positions."""
    low = np.zeros(prompt, dtype=np.int64)
    high = np.full(prompt, max(sum(image.rows for image in images), 1), dtype=np.int64)
    behind = np.zeros(prompt, dtype=np.bool_)
    group = offset = 0
    for number, image in enumerate(images):
        before = images[number - 1] if number else None
        if before is None or before.start + before.placeholders != image.start:
            group = offset
        offset += image.tokens
        low[image.start :], high[image.start :], behind[image.start :] = group, offset, True
    return ImageAttentionMask(low, high, behind)
