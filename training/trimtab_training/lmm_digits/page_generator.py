"""Pages of two by two cells, each empty or with one handwritten digit, on photo texture.

Digits, photos and their split are those of `trimtab_training.digits`. Digits stay in their cells, are larger, have more
contrast and are rotated less than there; there are no strokes and no scribbles, because a question may need all four
digits.
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
"""Label of an empty cell."""

SMALLEST_PX, LARGEST_PX = 30.0, 42.0
TEXTURE: Final = 0.5
"""Contrast of a photo, relative to pages of the digits pipeline."""

MAX_TURN_RADIANS: Final = 0.25
CONTRASTS: Final = (80.0, 130.0)


@dataclass(frozen=True, slots=True, eq=False)
class CellPage:
    """A page with the content of its cells."""

    pixels: NDArray[np.uint8]
    """[1, 96, 96]."""
    cells: tuple[int, ...]
    """Row by row: 0…9, or `EMPTY`."""


class CellPageSource:
    """Generator of pages, deterministic in split, seed and index."""

    def __init__(self, split: Split = "held-out", seed: int = 0) -> None:
        self.split: Split = split
        self.seed = seed
        self._datasets: Datasets = load_datasets(split)

    def page(self, index: int) -> CellPage:
        """Draw page `index` with one to four digits; ValueError if it is negative."""
        if index < 0:
            raise ValueError(f"page index {index} is negative: pages count from 0")
        random = np.random.default_rng([self.seed, index, 3 if self.split == "train" else 4])
        canvas = background(self._datasets, random)
        canvas = canvas.mean() + TEXTURE * (canvas - canvas.mean())
        cells = [EMPTY] * CELLS
        for cell in random.permutation(CELLS)[: 1 + int(random.integers(CELLS))].tolist():
            glyph = int(random.integers(len(self._datasets.labels)))
            ink = self._datasets.glyphs[glyph]
            paste(canvas, ink, _draw_square(cell, random), random, max_turn=MAX_TURN_RADIANS, contrasts=CONTRASTS)
            cells[cell] = int(self._datasets.labels[glyph])
        canvas += random.uniform(4, 16) * random.standard_normal(canvas.shape, dtype=np.float32)
        return CellPage(np.clip(canvas, 0, 255).astype(np.uint8)[None], tuple(cells))


def _draw_square(cell: int, random: np.random.Generator) -> PageDrawing:
    cell_px = PAGE_SIDE_PX / CELLS_A_SIDE
    side = float(random.uniform(SMALLEST_PX, LARGEST_PX))
    x, y = (random.random(2) * (cell_px - side) + side / 2).tolist()
    return PageDrawing(cell % CELLS_A_SIDE * cell_px + x, cell // CELLS_A_SIDE * cell_px + y, side)
