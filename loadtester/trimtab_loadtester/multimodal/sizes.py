"""Sizes of multimodal requests in production: input tokens, output tokens and images.

The quantiles are of the Azure LMM inference trace 2025 (CC BY 4.0; Qiu et al., ModServe, SoCC 2025), a week of a
million requests, read off its published plots (to 2 % in size and 0.3 points in rank). What else is assumed:

- A context counts the tokens of its images: those of image requests begin sharply at 245, which is one image, where
  those of text begin at 71; and the four of a hundred requests with the longest contexts have 400 images and more. So
  the text beside images is what their tokens leave of the context.
- The more images, the longer the context. The trace's plots show each alone; this is the order in which both fit.
- Above rank 0.99 contexts follow the power laws that the paper gives (densities of exponents 4.4 and 2.9), as far as a
  context of 131,072 tokens; outputs an exponent of 4, as far as 16,384.
- How long an answer is has nothing to do with how long its prompt was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MAX_IMAGES: Final = 16
"""Of a request that is served; the paper's evaluation takes 0 to 16. In the trace 12.5 % of image requests have more,
frames of videos mostly: they are served as so many."""
IMAGE_TOKENS: Final = 245
"""Of one image in the trace: the shortest context of a request with an image."""
MIN_TEXT_TOKENS: Final = 40
MAX_CONTEXT_TOKENS: Final = 131_072
MAX_OUTPUT_TOKENS: Final = 16_384
TAIL_RANK: Final = 0.99


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Sizes by rank, drawn in straight lines between those that are known; a power law beyond the last one.

    Attributes:
        ranks, sizes: ascending, from rank 0 to rank 0.99.
        tail: exponent of the share that is larger than a size.
        most: no size is larger.
    """

    ranks: tuple[float, ...]
    sizes: tuple[float, ...]
    tail: float
    most: int

    def at(self, ranks: Floats) -> Integers:
        """Sizes at ranks in 0 … 1."""
        within = np.interp(ranks, self.ranks, self.sizes)
        beyond = np.maximum(1.0 - ranks, 1e-12) / (1.0 - TAIL_RANK)
        sizes = np.where(ranks > TAIL_RANK, self.sizes[-1] * beyond ** (-1.0 / self.tail), within)
        return np.asarray(np.rint(np.minimum(sizes, self.most)), dtype=np.int64)


def _quantiles(least: float, written: Sequence[tuple[float, float]], tail: float, most: int) -> Quantiles:
    """Of percentiles and sizes, and the size at rank 0."""
    ranks, sizes = zip((0.0, least), *((percent / 100, size) for percent, size in written), strict=True)
    return Quantiles(ranks, sizes, tail, most)


TEXT_CONTEXTS: Final = _quantiles(
    MIN_TEXT_TOKENS,
    [(1, 71), (2, 113), (5, 136), (10, 175), (20, 305), (25, 368), (30, 439), (40, 598), (50, 779), (60, 993),
     (70, 1267), (75, 1446), (80, 1765), (85, 2201), (90, 3066), (92, 3500), (94, 3824), (95, 4132), (96, 5097),
     (97, 5819), (98, 7179), (99, 14080)],
    tail=1.9,
    most=MAX_CONTEXT_TOKENS,
)  # fmt: skip
IMAGE_CONTEXTS: Final = _quantiles(
    IMAGE_TOKENS,
    [(1, 250), (2, 258), (5, 344), (10, 424), (20, 713), (25, 870), (30, 950), (40, 1134), (50, 1399), (60, 2037),
     (70, 3740), (75, 3997), (80, 4717), (85, 6357), (90, 9460), (92, 9670), (94, 14080), (95, 20960), (96, 27630),
     (97, 32620), (98, 34470), (99, 35630)],
    tail=3.4,
    most=MAX_CONTEXT_TOKENS,
)  # fmt: skip
TEXT_OUTPUTS: Final = _quantiles(
    1,
    [(1, 1), (2, 1), (5, 1), (10, 8), (20, 16), (25, 26), (30, 45), (40, 84), (50, 146), (60, 197), (70, 210),
     (75, 219), (80, 247), (85, 330), (90, 471), (92, 553), (94, 679), (95, 756), (96, 879), (97, 927), (98, 1000),
     (99, 1320)],
    tail=3.0,
    most=MAX_OUTPUT_TOKENS,
)  # fmt: skip
IMAGE_OUTPUTS: Final = _quantiles(
    1,
    [(1, 1), (2, 3), (5, 9), (10, 15), (20, 28), (25, 33), (30, 40), (40, 56), (50, 80), (60, 106), (70, 143),
     (75, 179), (80, 252), (90, 401), (92, 437), (94, 486), (95, 508), (96, 547), (97, 584), (98, 636), (99, 806)],
    tail=3.0,
    most=MAX_OUTPUT_TOKENS,
)  # fmt: skip

_IMAGE_STEPS: Final = (
    (1, 0.660), (4, 0.707), (9, 0.856), (16, 0.875), (25, 0.922), (36, 0.927), (49, 0.933), (100, 0.945), (144, 0.948),
    (196, 0.954), (256, 0.960), (324, 0.963), (400, 0.966), (441, 0.975), (484, 0.984), (529, 0.997),
)  # fmt: skip
"""Images of an image request, and the share of requests with so many at most."""
_IMAGES_TAIL, _MOST_OF_THE_TRACE = 2.5, 9300
"""Beyond the last step: a power law that comes to the trace's greatest number once among its half a million."""
ONE_IMAGE_SHARE: Final = _IMAGE_STEPS[0][1]


def images_at(ranks: Floats) -> Integers:
    """Images of requests with images, by their rank in 0 … 1, as many as the trace has."""
    counts, shares = (np.array(column) for column in zip(*_IMAGE_STEPS, strict=True))
    within = counts[np.minimum(np.searchsorted(shares, ranks, side="left"), counts.size - 1)]
    beyond = np.maximum(1.0 - ranks, 1e-12) / (1.0 - shares[-1])
    found = np.where(ranks > shares[-1], counts[-1] * beyond ** (-1.0 / _IMAGES_TAIL), within)
    return np.asarray(np.minimum(found, _MOST_OF_THE_TRACE), dtype=np.int64)


def text_tokens_with_images(ranks: Floats) -> Integers:
    """Tokens of text beside images, by the rank of the request: what its images leave of its context."""
    beside: Integers = np.maximum(IMAGE_CONTEXTS.at(ranks) - IMAGE_TOKENS * images_at(ranks), MIN_TEXT_TOKENS)
    return beside
