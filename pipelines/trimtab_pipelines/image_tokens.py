"""How many tokens an image is, by its size alone and before anything runs, for each family of multimodal models. Pure.

Two numbers: what the encoder puts out, by which its pool is sized (ModServe, section 4), and how many places the image
takes in the prompt, which is what prefill costs and usage counts. They differ: LLaVA-OneVision encodes padding that it
cuts away again, Mllama's text attends to thousands of tokens behind one placeholder. Markers that a family writes as
text around or in an image (InternVL's two, SmolVLM's rows and columns) are text and not counted here.

The rules are those of each model's own processor in transformers, to the rounding; tests hold them against it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """What one image costs, in tokens.

    Attributes:
        encoded: what the encoder puts out, padding included.
        placeholders: positions of the prompt.
        tiles: pieces the image is cut into; an overview of the whole counts as one.
        rows: rows of pieces, without the overview; 0 where it is not cut.
        columns: columns of pieces, likewise.
    """

    encoded: int
    placeholders: int
    tiles: int
    rows: int = 0
    columns: int = 0


class ImageTokenRule(Protocol):
    """A family's rule."""

    def count(self, width_px: int, height_px: int, *, images: int = 1) -> ImageTokens:
        """Count one image of ``width_px`` by ``height_px`` in a request of ``images`` of them.

        Raises:
            ValueError: a side or the number of images is not positive.
        """
        ...


@dataclass(frozen=True, slots=True)
class OneTile:
    """Every image is scaled to one square: LLaVA 1.5 (``tokens`` 576), own models."""

    tokens: int

    def count(self, width_px: int, height_px: int, *, images: int = 1) -> ImageTokens:
        """The same for every size."""
        _require_positive(width_px, height_px, images)
        return ImageTokens(self.tokens, self.tokens, 1)


@dataclass(frozen=True, slots=True)
class AnyResolution:
    """LLaVA-NeXT and LLaVA-OneVision: the best of some resolutions, cut into tiles, beside an overview.

    Padding is encoded and then cut away; each row of what is left ends with a token of its own.

    Attributes:
        tile_px: side of a tile.
        tile_side_tokens: tokens along a tile's side.
        resolutions: (height, width) that an image may be scaled to, in px.
        max_tiles: what is left is scaled down to about as many tiles' tokens; None for LLaVA-NeXT, which keeps all.
        single_image_only: only an image that is alone in its request is cut; others are one tile and one token.
    """

    tile_px: int
    tile_side_tokens: int
    resolutions: Sequence[tuple[int, int]]
    max_tiles: int | None = None
    single_image_only: bool = False

    def count(self, width_px: int, height_px: int, *, images: int = 1) -> ImageTokens:
        """Count one image."""
        _require_positive(width_px, height_px, images)
        tile = self.tile_side_tokens**2
        if self.single_image_only and images > 1:
            return ImageTokens(tile, tile + 1, 1)
        height, width = _best_resolution(width_px, height_px, self.resolutions)
        rows, columns = height // self.tile_px, width // self.tile_px
        kept = self._unpadded(width_px, height_px, rows, columns)
        return ImageTokens((rows * columns + 1) * tile, tile + kept, rows * columns + 1, rows, columns)

    def _unpadded(self, width_px: int, height_px: int, rows: int, columns: int) -> int:
        """What is left once the padding is cut away, with one more token a row."""
        height, width = self.tile_side_tokens * rows, self.tile_side_tokens * columns
        if width_px / height_px > width / height:
            height -= (height - int(round(height_px * (width / width_px), 7))) // 2 * 2
        else:
            width -= (width - int(round(width_px * (height / height_px), 7))) // 2 * 2
        if self.max_tiles is not None:
            ratio = math.sqrt(height * width / (self.max_tiles * self.tile_side_tokens**2))
            if ratio > 1.1:  # the model's own tolerance
                height, width = int(height // ratio), int(width // ratio)
        return height * (width + 1)


@dataclass(frozen=True, slots=True)
class NearestGrid:
    """InternVL (and NVLM-D): the grid of tiles nearest in shape, and an overview where there is more than one tile.

    Attributes:
        tile_px: side of a tile.
        tile_tokens: tokens of a tile.
        max_tiles: most tiles of a grid.
        min_tiles: fewest tiles of a grid.
    """

    tile_px: int
    tile_tokens: int
    max_tiles: int
    min_tiles: int = 1

    def count(self, width_px: int, height_px: int, *, images: int = 1) -> ImageTokens:
        """Count one image."""
        _require_positive(width_px, height_px, images)
        columns, rows = self._grid(width_px, height_px)
        tiles = rows * columns + (rows * columns > 1)
        return ImageTokens(tiles * self.tile_tokens, tiles * self.tile_tokens, tiles, rows, columns)

    def _grid(self, width_px: int, height_px: int) -> tuple[int, int]:
        """Of grids equally near the one with more tiles, unless they would cover over twice the image's area."""
        sides = range(1, self.max_tiles + 1)
        grids = [(c, r) for c in sides for r in sides if self.min_tiles <= c * r <= self.max_tiles]
        best, least = (1, 1), math.inf
        for columns, rows in sorted(grids, key=math.prod):
            apart = abs(width_px / height_px - columns / rows)
            if apart < least:
                best, least = (columns, rows), apart
            elif apart == least and width_px * height_px > 0.5 * self.tile_px**2 * columns * rows:
                best = columns, rows
        return best


@dataclass(frozen=True, slots=True)
class Canvas:
    """Mllama (Llama 3.2 Vision): the canvas of tiles that needs the least scaling up, else the least scaling down.

    Attributes:
        tile_px: side of a tile.
        tile_tokens: tokens of a tile, its class token among them: (``tile_px`` / 14)² + 1.
        max_tiles: most tiles of a canvas.
    """

    tile_px: int
    tile_tokens: int
    max_tiles: int

    def count(self, width_px: int, height_px: int, *, images: int = 1) -> ImageTokens:
        """Count one image; it takes one place in the prompt, and is attended to from there on."""
        _require_positive(width_px, height_px, images)
        sides = range(1, self.max_tiles + 1)
        canvases = [(r, c) for r in sides for c in sides if r * c <= self.max_tiles]
        scales = {(r, c): min(r * self.tile_px / height_px, c * self.tile_px / width_px) for r, c in canvases}
        enlarging = [scale for scale in scales.values() if scale >= 1]
        chosen = min(enlarging) if enlarging else max(scales.values())
        rows, columns = min((canvas for canvas in canvases if scales[canvas] == chosen), key=math.prod)
        return ImageTokens(rows * columns * self.tile_tokens, 1, rows * columns, rows, columns)


@dataclass(frozen=True, slots=True)
class Splits:
    """SmolVLM and Idefics3: scaled to a longest side, then to whole tiles; an overview where there is more than one.

    Attributes:
        tile_px: side of a tile.
        tile_tokens: tokens of a tile.
        longest_px: the longer side an image is scaled to, up or down.
        upper_px: no side may be longer than this afterwards.
    """

    tile_px: int
    tile_tokens: int
    longest_px: int
    upper_px: int = 4096

    def count(self, width_px: int, height_px: int, *, images: int = 1) -> ImageTokens:
        """Count one image."""
        _require_positive(width_px, height_px, images)
        width, height = self._scaled(width_px, height_px)
        ratio = width / height
        if width >= height:
            width = math.ceil(width / self.tile_px) * self.tile_px
            height = math.ceil(int(width / ratio) / self.tile_px) * self.tile_px
        else:
            height = math.ceil(height / self.tile_px) * self.tile_px
            width = math.ceil(int(height * ratio) / self.tile_px) * self.tile_px
        rows, columns = height // self.tile_px, width // self.tile_px
        if rows * columns <= 1:
            return ImageTokens(self.tile_tokens, self.tile_tokens, 1)
        tiles = rows * columns + 1
        return ImageTokens(tiles * self.tile_tokens, tiles * self.tile_tokens, tiles, rows, columns)

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        """To the longest side, the other one even; then below the upper bound."""
        ratio = width / height
        if width >= height:
            width, height = self.longest_px, int(self.longest_px / ratio)
            height = max(height + height % 2, 1)
        else:
            width, height = int(self.longest_px * ratio), self.longest_px
            width = max(width + width % 2, 1)
        ratio = width / height
        if width >= height and width > self.upper_px:
            width, height = self.upper_px, max(int(self.upper_px / ratio), 1)
        elif height > width and height > self.upper_px:
            width, height = max(int(self.upper_px * ratio), 1), self.upper_px
        return width, height


def _grid_of(tile_px: int, side: int) -> tuple[tuple[int, int], ...]:
    return tuple((tile_px * r, tile_px * c) for r in range(1, side + 1) for c in range(1, side + 1))


RULES: Final[dict[str, ImageTokenRule]] = {
    "llava-1.5": OneTile(576),
    "llava-next": AnyResolution(336, 24, ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))),
    "llava-onevision": AnyResolution(384, 27, _grid_of(384, 6), max_tiles=9, single_image_only=True),
    "internvl": NearestGrid(448, 256, max_tiles=12),
    "llama-3.2-vision": Canvas(560, 1601, max_tiles=4),
    "smolvlm": Splits(384, 81, longest_px=1536),
    "smolvlm-500m": Splits(512, 64, longest_px=2048),
}
"""The families as published; other sizes of them are other arguments of the same rule."""


def _best_resolution(width_px: int, height_px: int, resolutions: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Of some (height, width) the one that keeps most of an image, and of those the one that wastes least."""

    def gain(resolution: tuple[int, int]) -> tuple[int, int]:
        height, width = resolution
        scale = min(width / width_px, height / height_px)
        kept = min(int(width_px * scale) * int(height_px * scale), width_px * height_px)
        return kept, kept - width * height

    return max(resolutions, key=gain)


def _require_positive(width_px: int, height_px: int, images: int) -> None:
    if min(width_px, height_px) < 1:
        raise ValueError(f"an image of {width_px} by {height_px} px; both sides should be at least 1")
    if images < 1:
        raise ValueError(f"an image in a request of {images} images; should be at least 1")
