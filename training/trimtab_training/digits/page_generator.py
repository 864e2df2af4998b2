"""Pages with ground truth: one to three handwritten digits and up to two scribbles on noisy photo texture.

Locators and readers find different pages hard, so that their errors are nearly independent and the product of their
accuracies predicts the pipeline's (PAS in the IPA paper). Scribbles, which are digits cut into rotated and exchanged
quarters, make locating hard; slant, a stroke through a digit and the handwriting make reading hard.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimtab_model_servers.families.digits import PAGE_SIDE_PX
from trimtab_training.digits.datasets import GLYPH_SIDE_PX, Datasets, Split, load_datasets, sample

MAX_DIGITS: Final = 3
MAX_SCRIBBLES: Final = 2
SMALLEST_PX, LARGEST_PX = 20.0, 34.0
"""Side of the square of a digit; its ink fills 24/28 of it."""

CENTRE_TOLERANCE: Final = 0.15
"""A box matches a digit if their centres lie within this share of the digit's side (3 to 5 px)."""

EVALUATION_PAGES, EVALUATION_SEED = 12_000, 13
_PLACEMENT_TRIES: Final = 12
_STRUCK_SHARE: Final = 0.4
_GRID: Final = np.arange(GLYPH_SIDE_PX, dtype=np.float32) - np.float32((GLYPH_SIDE_PX - 1) / 2)

_SPACING: Final = 1.0
"""Least distance of two centres, as a share of their mean side."""


@dataclass(frozen=True, slots=True, eq=False)
class Page:
    """A page with the boxes and labels of its digits."""

    pixels: NDArray[np.uint8]
    """[1, 96, 96]."""
    boxes: NDArray[np.float32]
    """[k, 4], x0 y0 x1 y1 in pixels, k = 1…3."""
    labels: NDArray[np.int64]
    """[k], the digit in each box."""


class PageScore(NamedTuple):
    """Comparison of an answer with its page; sums over pages give the accuracies.

    Locator accuracy is matched/total, reader accuracy correct/matched, pipeline accuracy correct/total.
    """

    correct: int
    matched: int
    total: int


@dataclass(frozen=True, slots=True)
class PageDrawing:
    """Centre and side of a square to draw in."""

    x: float
    y: float
    side: float


class PageSource:
    """Generator of pages, deterministic in split, seed and index."""

    def __init__(self, split: Split = "held-out", seed: int = 0) -> None:
        self.split: Split = split
        self.seed = seed
        self._datasets: Datasets = load_datasets(split)

    def page(self, index: int) -> Page:
        """Draw page `index`; ValueError if it is negative."""
        if index < 0:
            raise ValueError(f"page index {index} is negative: pages count from 0")
        random = np.random.default_rng([self.seed, index, 1 if self.split == "train" else 2])
        canvas = background(self._datasets, random)
        drawings = _place_drawings(random)
        digit_count = min(1 + int(random.integers(MAX_DIGITS)), len(drawings))
        scribble_count = int(random.integers(MAX_SCRIBBLES + 1))
        chosen = random.integers(len(self._datasets.labels), size=len(drawings))
        for position, drawing in enumerate(drawings[: digit_count + scribble_count]):
            glyph = self._datasets.glyphs[chosen[position]]
            shape = glyph if position < digit_count else _scribble(glyph, random)
            paste(canvas, _strike(shape, random), drawing, random)
        canvas += random.uniform(4, 16) * random.standard_normal(canvas.shape, dtype=np.float32)
        boxes = [(d.x - d.side / 2, d.y - d.side / 2, d.x + d.side / 2, d.y + d.side / 2) for d in drawings]
        return Page(
            pixels=np.clip(canvas, 0, 255).astype(np.uint8)[None],
            boxes=np.array(boxes[:digit_count], dtype=np.float32),
            labels=self._datasets.labels[chosen[:digit_count]],
        )

    def pages(self, start: int, count: int) -> list[Page]:
        return [self.page(index) for index in range(start, start + count)]


def match_boxes(truth: Page, boxes: NDArray[np.float32]) -> NDArray[np.int64]:
    """Match boxes [m, 4] one to one with digits, nearest first: the index of each box's digit or -1, int64 [m]."""
    digit_of_box = np.full(len(boxes), -1, dtype=np.int64)
    true_centres, centres = (truth.boxes[:, :2] + truth.boxes[:, 2:]) / 2, (boxes[:, :2] + boxes[:, 2:]) / 2
    sides = truth.boxes[:, 2] - truth.boxes[:, 0]
    distance = np.linalg.norm(true_centres[:, None] - centres[None], axis=2) / sides[:, None]  # [k, m] in sides
    while distance.size and (nearest := float(distance.min())) <= CENTRE_TOLERANCE:
        digit, row = np.argwhere(distance == nearest)[0]
        digit_of_box[row] = digit
        distance[digit, :] = distance[:, row] = np.inf
    return digit_of_box


def score_page(truth: Page, boxes: NDArray[np.float32], labels: NDArray[np.int64]) -> PageScore:
    """Compare predicted boxes [m, 4] and labels [m] with the truth; ValueError if their numbers differ.

    `total` is the larger of the two counts, so that a missed digit and an invented one cost the same.
    """
    if len(boxes) != len(labels):
        raise ValueError(f"{len(boxes)} boxes but {len(labels)} labels: should be one label a box")
    digit_of_box = match_boxes(truth, boxes)
    matched = digit_of_box >= 0
    correct = truth.labels[digit_of_box[matched]] == np.asarray(labels)[matched]
    return PageScore(int(correct.sum()), int(matched.sum()), max(len(truth.labels), len(labels)))


class EvaluationPages:
    """Held-out pages as samples of `trimtab evaluate`."""

    def __init__(self) -> None:
        self._source = PageSource("held-out", EVALUATION_SEED)

    def __len__(self) -> int:
        return EVALUATION_PAGES

    def __getitem__(self, index: int) -> tuple[dict[str, NDArray[np.uint8]], Page]:
        page = self._source.page(index)
        return {"image": page.pixels}, page

    def score(self, truth: Page, outputs: Mapping[str, NDArray[Any]]) -> tuple[int, int, NDArray[np.int64]]:
        """Correct and expected digits, and each row's correctness, -1 for a box without a digit."""
        boxes, labels = outputs["boxes"].reshape(-1, 4), outputs["digit"].reshape(-1)
        digit_of_box, result = match_boxes(truth, boxes), score_page(truth, boxes, labels)
        right = truth.labels[digit_of_box] == labels
        return result.correct, result.total, np.where(digit_of_box < 0, -1, right)


def background(datasets: Datasets, random: np.random.Generator) -> NDArray[np.float32]:
    """Cut a square [96, 96] from a photo, flip or transpose it, and change its contrast and brightness."""
    photo = datasets.photos[random.integers(len(datasets.photos))]
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


def _place_drawings(random: np.random.Generator) -> list[PageDrawing]:
    """Squares for digits and scribbles that lie on the page and do not overlap heavily."""
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


def _apart(first: PageDrawing, second: PageDrawing) -> bool:
    distance_squared = (first.x - second.x) ** 2 + (first.y - second.y) ** 2
    return distance_squared >= (_SPACING * (first.side + second.side) / 2) ** 2


def _scribble(glyph: NDArray[np.float32], random: np.random.Generator) -> NDArray[np.float32]:
    """Rotate and exchange the quarters of a glyph: strokes, but no digit."""
    half = GLYPH_SIDE_PX // 2
    quarters = [glyph[y : y + half, x : x + half] for y in (0, half) for x in (0, half)]
    turned = [np.rot90(quarters[old], 1 + 2 * int(random.integers(2))) for old in random.permutation(4)]
    return np.concatenate([np.concatenate(turned[:2], axis=1), np.concatenate(turned[2:], axis=1)])


def _strike(glyph: NDArray[np.float32], random: np.random.Generator) -> NDArray[np.float32]:
    """Draw a pen stroke through 40 % of the glyphs."""
    chance, angle, offset = random.random(3)
    if chance > _STRUCK_SHARE:
        return glyph
    across = np.cos(angle * np.pi) * _GRID + np.sin(angle * np.pi) * _GRID[:, None]
    stroke = np.clip(1.2 - np.abs(across + (offset - 0.5) * 12), 0, 0.9)
    struck: NDArray[np.float32] = np.maximum(glyph, stroke).astype(np.float32)
    return struck


def paste(
    canvas: NDArray[np.float32],
    glyph: NDArray[np.float32],
    drawing: PageDrawing,
    random: np.random.Generator,
    *,
    max_turn: float = 0.5,
    contrasts: tuple[float, float] = (55.0, 130.0),
) -> None:
    """Draw a rotated (radians) and slanted glyph onto a canvas, lighter or darker than the ground."""
    turn, slant, stretch = random.uniform([-max_turn, -0.3, 0.85], [max_turn, 0.3, 1.15])
    left, top = int(np.floor(drawing.x - drawing.side / 2)), int(np.floor(drawing.y - drawing.side / 2))
    reach = int(np.ceil(drawing.side)) + 1
    region = canvas[max(top, 0) : top + reach, max(left, 0) : left + reach]
    scale = GLYPH_SIDE_PX / drawing.side
    across = ((np.arange(region.shape[1]) + max(left, 0) + 0.5 - drawing.x) * scale).astype(np.float32)[None, :]
    down = ((np.arange(region.shape[0]) + max(top, 0) + 0.5 - drawing.y) * scale).astype(np.float32)[:, None]
    middle = (GLYPH_SIDE_PX - 1) / 2
    cosine, sine = float(np.cos(turn)), float(np.sin(turn))
    x = (cosine * across + sine * down) * float(stretch) + float(slant) * down + middle
    y = -sine * across + cosine * down + middle
    ink = sample(glyph, x, y) * np.float32(random.uniform(0.75, 1.0))
    ground = float(region.mean())
    contrast = random.uniform(*contrasts)
    lighter = ground + contrast <= 255 and (ground < contrast or random.random() < 0.5)
    colour = np.float32(ground + contrast if lighter else max(ground - contrast, 0))
    region += ink * (colour - region)
