"""Pages of two by two cells, each empty or with one handwritten digit, on photo texture; what is where is known.

Digits, photos and their split into train and held-out are those of the digits pipeline (``digits.sources``). These
pages are easier than its own: a digit stays in its cell, is larger, stands out more and is turned less, none is struck
through, and there are no scribbles. A question that needs four digits right at once can be answered on them.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trimtab_model_servers.families.digits import PAGE_SIDE_PX
from trimtab_model_servers.families.lmm_digits import CELLS, CELLS_A_SIDE
from trimtab_training.digits.datasets import Datasets, Split, load_datasets
from trimtab_training.digits.page_generator import PageDrawing, background, paste

EMPTY: Final = 10
"""What a cell's label is when it shows no digit."""

SMALLEST_PX, LARGEST_PX = 30.0, 42.0
TEXTURE: Final = 0.5
"""How much of a photo's texture is kept, against the digits pipeline's pages."""

MOST_TURN_RADIANS: Final = 0.25
CONTRASTS: Final = (80.0, 130.0)


@dataclass(frozen=True, slots=True, eq=False)
class CellPage:
    """One page and what it shows.

    Attributes:
        pixels: uint8 [1, 96, 96].
        cells: what the cells hold, row by row: 0…9, or ``EMPTY``.
    """

    pixels: NDArray[np.uint8]
    cells: tuple[int, ...]


class CellPageSource:
    """An endless supply of pages, the same for the same split, seed and index."""

    def __init__(self, split: Split = "held-out", seed: int = 0) -> None:
        self.split: Split = split
        self.seed = seed
        self._sources: Datasets = load_datasets(split)

    def page(self, index: int) -> CellPage:
        """Draw page ``index`` (0, 1, 2, …); one to four digits, each number as often as any other.

        Raises:
            ValueError: when ``index`` is negative.
        """
        if index < 0:
            raise ValueError(f"page index {index} is negative: pages count from 0")
        random = np.random.default_rng([self.seed, index, 3 if self.split == "train" else 4])
        canvas = background(self._sources, random)
        canvas = canvas.mean() + TEXTURE * (canvas - canvas.mean())
        cells = [EMPTY] * CELLS
        for cell in random.permutation(CELLS)[: 1 + int(random.integers(CELLS))].tolist():
            glyph = int(random.integers(len(self._sources.labels)))
            ink = self._sources.glyphs[glyph]
            paste(canvas, ink, _place(cell, random), random, most_turn=MOST_TURN_RADIANS, contrasts=CONTRASTS)
            cells[cell] = int(self._sources.labels[glyph])
        canvas += random.uniform(4, 16) * random.standard_normal(canvas.shape, dtype=np.float32)
        return CellPage(np.clip(canvas, 0, 255).astype(np.uint8)[None], tuple(cells))


def _place(cell: int, random: np.random.Generator) -> PageDrawing:
    """A square wholly inside a cell."""
    room = PAGE_SIDE_PX / CELLS_A_SIDE
    side = float(random.uniform(SMALLEST_PX, LARGEST_PX))
    x, y = (random.random(2) * (room - side) + side / 2).tolist()
    return PageDrawing(cell % CELLS_A_SIDE * room + x, cell // CELLS_A_SIDE * room + y, side)
