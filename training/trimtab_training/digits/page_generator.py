"""Pages with known truth: one to three handwritten digits, and scribbles that are none, on noisy photo texture.

What makes a page hard for ``locate`` is kept apart from what makes a digit hard for ``read``. Scribbles (digits cut
into quarters that are turned and exchanged) have the strokes of handwriting and can only be told from digits by
shape; a digit's slant, a stroke through it and the hand that wrote it trouble mainly the reader. So the two stages are
right nearly independently, and the product of their accuracies predicts the pipeline's (PAS in the IPA paper).
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimtab_model_servers.families.digits import PAGE_SIDE_PX
from trimtab_training.digits.datasets import GLYPH_SIDE_PX, Datasets, Split, load_datasets, sample

MAX_DIGITS: Final = 3
MAX_SCRIBBLES: Final = 2
SMALLEST_PX, LARGEST_PX = 20.0, 34.0
"""Side of the square a digit is drawn in; its ink fills 24/28 of it."""

CENTRE_TOLERANCE: Final = 0.15
"""A box finds a digit when their centres lie within this share of the digit's side (3 to 5 px)."""

_PLACEMENT_TRIES: Final = 12
_STRUCK_SHARE: Final = 0.4
_GRID: Final = np.arange(GLYPH_SIDE_PX, dtype=np.float32) - np.float32((GLYPH_SIDE_PX - 1) / 2)

_SPACING: Final = 1.0
"""Least distance of two centres, as a share of the mean of their sides."""


@dataclass(frozen=True, slots=True, eq=False)
class Page:
    """One input and what is on it.

    Attributes:
        pixels: uint8 [1, 96, 96].
        boxes: float32 [k, 4], x0 y0 x1 y1 in pixels, k = 1…3.
        labels: int64 [k], the digit in each box.
    """

    pixels: NDArray[np.uint8]
    boxes: NDArray[np.float32]
    labels: NDArray[np.int64]


class PageScore(NamedTuple):
    """How the answer for a page compares with its truth; sums over pages give every accuracy of the pipeline.

    Locating is right in matched/total cases, reading in correct/matched, the pipeline in correct/total.
    """

    correct: int
    matched: int
    total: int


@dataclass(frozen=True, slots=True)
class PageDrawing:
    """A square to fill with ink: where, how large, how transformed."""

    x: float
    y: float
    side: float


class PageSource:
    """An endless supply of pages, the same for the same split, seed and index."""

    def __init__(self, split: Split = "held-out", seed: int = 0) -> None:
        self.split: Split = split
        self.seed = seed
        self._sources: Datasets = load_datasets(split)

    def page(self, index: int) -> Page:
        """Draw page ``index`` (0, 1, 2, …).

        Raises:
            ValueError: when ``index`` is negative.
        """
        if index < 0:
            raise ValueError(f"page index {index} is negative: pages count from 0")
        random = np.random.default_rng([self.seed, index, 1 if self.split == "train" else 2])
        canvas = background(self._sources, random)
        drawings = _layout(random)
        digit_count = min(1 + int(random.integers(MAX_DIGITS)), len(drawings))
        scribble_count = int(random.integers(MAX_SCRIBBLES + 1))
        chosen = random.integers(len(self._sources.labels), size=len(drawings))
        for position, drawing in enumerate(drawings[: digit_count + scribble_count]):
            glyph = self._sources.glyphs[chosen[position]]
            shape = glyph if position < digit_count else _scribble(glyph, random)
            paste(canvas, _struck(shape, random), drawing, random)
        canvas += random.uniform(4, 16) * random.standard_normal(canvas.shape, dtype=np.float32)
        boxes = [(d.x - d.side / 2, d.y - d.side / 2, d.x + d.side / 2, d.y + d.side / 2) for d in drawings]
        return Page(
            pixels=np.clip(canvas, 0, 255).astype(np.uint8)[None],
            boxes=np.array(boxes[:digit_count], dtype=np.float32),
            labels=self._sources.labels[chosen[:digit_count]],
        )

    def pages(self, start: int, count: int) -> list[Page]:
        """Draw pages ``start`` … ``start + count - 1``."""
        return [self.page(index) for index in range(start, start + count)]


def match_boxes(truth: Page, boxes: NDArray[np.float32]) -> NDArray[np.int64]:
    """Name the digit that each of the predicted ``boxes`` [m, 4] finds: int64 [m], -1 where it finds none.

    A box finds at most one digit and a digit is found by at most one box, nearest pairs first.
    """
    found = np.full(len(boxes), -1, dtype=np.int64)
    true_centres, centres = (truth.boxes[:, :2] + truth.boxes[:, 2:]) / 2, (boxes[:, :2] + boxes[:, 2:]) / 2
    sides = truth.boxes[:, 2] - truth.boxes[:, 0]
    distance = np.linalg.norm(true_centres[:, None] - centres[None], axis=2) / sides[:, None]  # [k, m] in sides
    while distance.size and (nearest := float(distance.min())) <= CENTRE_TOLERANCE:
        digit, row = np.argwhere(distance == nearest)[0]
        found[row] = digit
        distance[digit, :] = distance[:, row] = np.inf
    return found


def score_page(truth: Page, boxes: NDArray[np.float32], labels: NDArray[np.int64]) -> PageScore:
    """Compare predicted ``boxes`` [m, 4] and ``labels`` [m] with the truth.

    ``total`` is the larger of the two counts, so a missed digit and an invented one cost the same.

    Raises:
        ValueError: when there are not as many labels as boxes.
    """
    if len(boxes) != len(labels):
        raise ValueError(f"{len(boxes)} boxes but {len(labels)} labels: should be one label a box")
    found = match_boxes(truth, boxes)
    matched = found >= 0
    correct = truth.labels[found[matched]] == np.asarray(labels)[matched]
    return PageScore(int(correct.sum()), int(matched.sum()), max(len(truth.labels), len(labels)))


def background(sources: Datasets, random: np.random.Generator) -> NDArray[np.float32]:
    """Cut a square [96, 96] from a photo, mirror or turn it, and change its contrast and brightness."""
    photo = sources.photos[random.integers(len(sources.photos))]
    top = random.integers(photo.shape[0] - PAGE_SIDE_PX + 1)
    left = random.integers(photo.shape[1] - PAGE_SIDE_PX + 1)
    square = photo[top : top + PAGE_SIDE_PX, left : left + PAGE_SIDE_PX]
    if random.random() < 0.5:
        square = square[:, ::-1]
    if random.random() < 0.5:
        square = square.T
    texture = square.astype(np.float32)
    brightness = random.uniform(70, 185)
    texture -= texture.mean()
    texture *= random.uniform(0.25, 0.7)
    texture += brightness
    return texture


def _layout(random: np.random.Generator) -> list[PageDrawing]:
    """Places for up to all digits and scribbles, none heavily over another, all wholly on the page."""
    drawings: list[PageDrawing] = []
    draws = random.random((MAX_DIGITS + MAX_SCRIBBLES, _PLACEMENT_TRIES, 2))
    sides = random.uniform(SMALLEST_PX, LARGEST_PX, MAX_DIGITS + MAX_SCRIBBLES)
    for side, tries in zip(sides.tolist(), draws.tolist(), strict=True):
        room = PAGE_SIDE_PX - side
        for x_share, y_share in tries:
            drawing = PageDrawing(side / 2 + x_share * room, side / 2 + y_share * room, side)
            if all(_apart(drawing, other) for other in drawings):
                drawings.append(drawing)
                break
    return drawings


def _apart(one: PageDrawing, other: PageDrawing) -> bool:
    distance_squared = (one.x - other.x) ** 2 + (one.y - other.y) ** 2
    return distance_squared >= (_SPACING * (one.side + other.side) / 2) ** 2


def _scribble(glyph: NDArray[np.float32], random: np.random.Generator) -> NDArray[np.float32]:
    """Cut a glyph into quarters, turn each by a quarter or three and exchange them: strokes, but no digit."""
    half = GLYPH_SIDE_PX // 2
    quarters = [glyph[y : y + half, x : x + half] for y in (0, half) for x in (0, half)]
    turned = [np.rot90(quarters[old], 1 + 2 * int(random.integers(2))) for old in random.permutation(4)]
    return np.concatenate([np.concatenate(turned[:2], axis=1), np.concatenate(turned[2:], axis=1)])


def _struck(glyph: NDArray[np.float32], random: np.random.Generator) -> NDArray[np.float32]:
    """Draw a pen stroke through many glyphs, digit or not: it hides shape from the reader, not place from locators."""
    chance, angle, away = random.random(3)
    if chance > _STRUCK_SHARE:
        return glyph
    across = np.cos(angle * np.pi) * _GRID + np.sin(angle * np.pi) * _GRID[:, None]
    stroke = np.clip(1.2 - np.abs(across + (away - 0.5) * 12), 0, 0.9)
    drawn: NDArray[np.float32] = np.maximum(glyph, stroke).astype(np.float32)
    return drawn


def paste(
    canvas: NDArray[np.float32],
    glyph: NDArray[np.float32],
    drawing: PageDrawing,
    random: np.random.Generator,
    *,
    most_turn: float = 0.5,
    contrasts: tuple[float, float] = (55.0, 130.0),
) -> None:
    """Draw ``glyph`` onto ``canvas``, turned (radians) and slanted, lighter or darker than what lies below it."""
    turn, slant, stretch = random.uniform([-most_turn, -0.3, 0.85], [most_turn, 0.3, 1.15])
    left, top = int(np.floor(drawing.x - drawing.side / 2)), int(np.floor(drawing.y - drawing.side / 2))
    reach = int(np.ceil(drawing.side)) + 1
    window = canvas[max(top, 0) : top + reach, max(left, 0) : left + reach]
    scale = GLYPH_SIDE_PX / drawing.side
    across = ((np.arange(window.shape[1]) + max(left, 0) + 0.5 - drawing.x) * scale).astype(np.float32)[None, :]
    down = ((np.arange(window.shape[0]) + max(top, 0) + 0.5 - drawing.y) * scale).astype(np.float32)[:, None]
    middle = (GLYPH_SIDE_PX - 1) / 2
    cosine, sine = float(np.cos(turn)), float(np.sin(turn))
    x = (cosine * across + sine * down) * float(stretch) + float(slant) * down + middle
    y = -sine * across + cosine * down + middle
    ink = sample(glyph, x, y) * np.float32(random.uniform(0.75, 1.0))
    around = float(window.mean())
    contrast = random.uniform(*contrasts)
    lighter = around + contrast <= 255 and (around < contrast or random.random() < 0.5)
    colour = np.float32(around + contrast if lighter else max(around - contrast, 0))
    window += ink * (colour - window)
