"""Sizes of multimodal requests in production: input tokens, output tokens and images.

The quantiles are of the Azure LMM inference trace 2025 (CC BY 4.0; Qiu et al., ModServe, SoCC 2025), a week with a
million requests, read from its published plots (to 2 % in size and 0.3 points in rank). Assumptions:

- A context includes the tokens of its images. Contexts of image requests begin at 245 tokens, the size of one image,
  and contexts of text requests at 71; the 4 % of requests with the longest contexts have 400 images or more. The text
  tokens of an image request are therefore its context less its image tokens.
- Context length increases with the number of images. The plots of the trace show each distribution separately.
- Above rank 0.99 contexts follow the power laws of the paper (densities with exponents 4.4 and 2.9) up to 131,072
  tokens; outputs follow one with exponent 4 up to 16,384 tokens.
- Output length is independent of prompt length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MAX_IMAGES: Final = 16
"""Maximum images of a request, as in the paper's evaluation. 12.5 % of the trace's image requests have more, mostly
frames of videos; they are capped."""
IMAGE_TOKENS: Final = 245
"""Tokens of one image in the trace: the shortest context of an image request."""
MIN_TEXT_TOKENS: Final = 40
MAX_CONTEXT_TOKENS: Final = 131_072
MAX_OUTPUT_TOKENS: Final = 16_384
TAIL_RANK: Final = 0.99


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Sizes by rank: linear interpolation between known quantiles, and a power law above the last."""

    ranks: tuple[float, ...]
    """Ascending, from 0 to 0.99."""
    sizes: tuple[float, ...]
    """Ascending, one for each rank."""
    tail: float
    """Exponent of the complementary distribution function."""
    maximum: int

    def at(self, ranks: Floats) -> Integers:
        """Sizes at ranks within 0…1."""
        within = np.interp(ranks, self.ranks, self.sizes)
        beyond = np.maximum(1.0 - ranks, 1e-12) / (1.0 - TAIL_RANK)
        sizes = np.where(ranks > TAIL_RANK, self.sizes[-1] * beyond ** (-1.0 / self.tail), within)
        return np.asarray(np.rint(np.minimum(sizes, self.maximum)), dtype=np.int64)


def _quantiles(minimum: float, percentiles: Sequence[tuple[float, float]], tail: float, maximum: int) -> Quantiles:
    ranks, sizes = zip((0.0, minimum), *((percent / 100, size) for percent, size in percentiles), strict=True)
    return Quantiles(ranks, sizes, tail, maximum)


TEXT_CONTEXTS: Final = _quantiles(
    MIN_TEXT_TOKENS,
    [(1, 71), (2, 113), (5, 136), (10, 175), (20, 305), (25, 368), (30, 439), (40, 598), (50, 779), (60, 993),
     (70, 1267), (75, 1446), (80, 1765), (85, 2201), (90, 3066), (92, 3500), (94, 3824), (95, 4132), (96, 5097),
     (97, 5819), (98, 7179), (99, 14080)],
    tail=1.9,
    maximum=MAX_CONTEXT_TOKENS,
)  # fmt: skip
IMAGE_CONTEXTS: Final = _quantiles(
    IMAGE_TOKENS,
    [(1, 250), (2, 258), (5, 344), (10, 424), (20, 713), (25, 870), (30, 950), (40, 1134), (50, 1399), (60, 2037),
     (70, 3740), (75, 3997), (80, 4717), (85, 6357), (90, 9460), (92, 9670), (94, 14080), (95, 20960), (96, 27630),
     (97, 32620), (98, 34470), (99, 35630)],
    tail=3.4,
    maximum=MAX_CONTEXT_TOKENS,
)  # fmt: skip
TEXT_OUTPUTS: Final = _quantiles(
    1,
    [(1, 1), (2, 1), (5, 1), (10, 8), (20, 16), (25, 26), (30, 45), (40, 84), (50, 146), (60, 197), (70, 210),
     (75, 219), (80, 247), (85, 330), (90, 471), (92, 553), (94, 679), (95, 756), (96, 879), (97, 927), (98, 1000),
     (99, 1320)],
    tail=3.0,
    maximum=MAX_OUTPUT_TOKENS,
)  # fmt: skip
IMAGE_OUTPUTS: Final = _quantiles(
    1,
    [(1, 1), (2, 3), (5, 9), (10, 15), (20, 28), (25, 33), (30, 40), (40, 56), (50, 80), (60, 106), (70, 143),
     (75, 179), (80, 252), (90, 401), (92, 437), (94, 486), (95, 508), (96, 547), (97, 584), (98, 636), (99, 806)],
    tail=3.0,
    maximum=MAX_OUTPUT_TOKENS,
)  # fmt: skip

_IMAGE_STEPS: Final = (
    (1, 0.660), (4, 0.707), (9, 0.856), (16, 0.875), (25, 0.922), (36, 0.927), (49, 0.933), (100, 0.945), (144, 0.948),
    (196, 0.954), (256, 0.960), (324, 0.963), (400, 0.966), (441, 0.975), (484, 0.984), (529, 0.997),
)  # fmt: skip
"""Images of an image request, and the share of image requests with at most this number."""
_IMAGES_TAIL, _MAX_TRACE_IMAGES = 2.5, 9300
"""Power law above the last step; it reaches the trace's maximum about once in half a million image requests."""
ONE_IMAGE_SHARE: Final = _IMAGE_STEPS[0][1]


def images_at(ranks: Floats) -> Integers:
    """Images of image requests, by rank within 0…1, not capped at `MAX_IMAGES`."""
    counts, shares = (np.array(column) for column in zip(*_IMAGE_STEPS, strict=True))
    within = counts[np.minimum(np.searchsorted(shares, ranks, side="left"), counts.size - 1)]
    beyond = np.maximum(1.0 - ranks, 1e-12) / (1.0 - shares[-1])
    images = np.where(ranks > shares[-1], counts[-1] * beyond ** (-1.0 / _IMAGES_TAIL), within)
    return np.asarray(np.minimum(images, _MAX_TRACE_IMAGES), dtype=np.int64)


def text_tokens_with_images(ranks: Floats) -> Integers:
    """Text tokens of image requests, by rank: context tokens less image tokens."""
    text_tokens: Integers = np.maximum(IMAGE_CONTEXTS.at(ranks) - IMAGE_TOKENS * images_at(ranks), MIN_TEXT_TOKENS)
    return text_tokens
