"""Image token counts by image size, for each family of multimodal models.

Two numbers: the tokens that the encoder produces, by which its pool is sized (ModServe, section 4), and the placeholder
tokens in the prompt, which determine prefill time and usage. They differ: LLaVA-OneVision encodes padding and removes
it afterwards; Mllama's text attends to thousands of tokens behind one placeholder. Markers that a family writes as text
around or in an image (InternVL's two, SmolVLM's rows and columns) are not counted.

The rules match each model's processor in transformers, including rounding; tests compare them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Token counts of one image."""

    encoded: int
    """Tokens that the encoder produces, including padding."""
    placeholders: int
    """Tokens in the prompt."""
    tiles: int
    """Tiles that the image is cut into; an overview counts as one."""
    rows: int = 0
    """Rows of tiles, without the overview; 0 if the image is not cut."""
    columns: int = 0
    """Columns of tiles, without the overview; 0 if the image is not cut."""


class ImageTokenRule(Protocol):
    """Token counting rule of a family."""

    def count(self, width_px: int, height_px: int, *, images: int = 1) -> ImageTokens:
        """Count the tokens of one image in a request with a number of images.

        Raises ValueError if a side or the number of images is not positive.
        """
        ...


@dataclass(frozen=True, slots=True)
class OneTile:
    """Every image is scaled to one square: LLaVA 1.5 (``tokens`` 576), own models."""

    tokens: int

    def count(self, width_px: int, height_px: int, *, images: int = 1) -> ImageTokens:
        _require_positive(width_px, height_px, images)
        return ImageTokens(self.tokens, self.tokens, 1)


@dataclass(frozen=True, slots=True)
class AnyResolution:
    """LLaVA-NeXT and LLaVA-OneVision: the best of several resolutions, cut into tiles, plus an overview.

    Padding is encoded and then removed; each remaining row ends with an additional token.
    """

    tile_px: int
    """Side length of a tile."""
    tile_side_tokens: int
    """Tokens along a tile's side."""
    resolutions: Sequence[tuple[int, int]]
    """(height, width) in px that an image may be scaled to."""
    max_tiles: int | None = None
    """The result is scaled down to about this many tiles' tokens; None (LLaVA-NeXT) disables scaling."""
    single_image_only: bool = False
    """Only an image that is alone in its request is cut; others are one tile and one additional token."""

    def count(self, width_px: int, height_px: int, *, images: int = 1) -> ImageTokens:
        _require_positive(width_px, height_px, images)
        tile = self.tile_side_tokens**2
        if self.single_image_only and images > 1:
            return ImageTokens(tile, tile + 1, 1)
        height, width = _best_resolution(width_px, height_px, self.resolutions)
        rows, columns = height // self.tile_px, width // self.tile_px
        unpadded = self._unpadded(width_px, height_px, rows, columns)
        return ImageTokens((rows * columns + 1) * tile, tile + unpadded, rows * columns + 1, rows, columns)

    def _unpadded(self, width_px: int, height_px: int, rows: int, columns: int) -> int:
        """Tokens without padding, with one additional token per row."""
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
    """InternVL (and NVLM-D): the tile grid with the nearest aspect ratio, plus an overview if it has several tiles."""

    tile_px: int
    """Side length of a tile."""
    tile_tokens: int
    """Tokens of a tile."""
    max_tiles: int
    """Maximum number of tiles in a grid."""
    min_tiles: int = 1
    """Minimum number of tiles in a grid."""

    def count(self, width_px: int, height_px: int, *, images: int = 1) -> ImageTokens:
        _require_positive(width_px, height_px, images)
        columns, rows = self._grid(width_px, height_px)
        tiles = rows * columns + (rows * columns > 1)
        return ImageTokens(tiles * self.tile_tokens, tiles * self.tile_tokens, tiles, rows, columns)

    def _grid(self, width_px: int, height_px: int) -> tuple[int, int]:
        """The nearest grid; of equally near ones the larger, unless it covers more than twice the image's area."""
        sides = range(1, self.max_tiles + 1)
        grids = [(c, r) for c in sides for r in sides if self.min_tiles <= c * r <= self.max_tiles]
        best, smallest = (1, 1), math.inf
        for columns, rows in sorted(grids, key=math.prod):
            difference = abs(width_px / height_px - columns / rows)
            if difference < smallest:
                best, smallest = (columns, rows), difference
            elif difference == smallest and width_px * height_px > 0.5 * self.tile_px**2 * columns * rows:
                best = columns, rows
        return best


@dataclass(frozen=True, slots=True)
class Canvas:
    """Mllama (Llama 3.2 Vision): the tile canvas with the least upscaling, else with the least downscaling."""

    tile_px: int
    """Side length of a tile."""
    tile_tokens: int
    """Tokens of a tile, including its class token: (``tile_px`` / 14)² + 1."""
    max_tiles: int
    """Maximum number of tiles in a canvas."""

    def count(self, width_px: int, height_px: int, *, images: int = 1) -> ImageTokens:
        """Count the tokens of one image, which has one placeholder in the prompt."""
        _require_positive(width_px, height_px, images)
        sides = range(1, self.max_tiles + 1)
        canvases = [(r, c) for r in sides for c in sides if r * c <= self.max_tiles]
        scales = {(r, c): min(r * self.tile_px / height_px, c * self.tile_px / width_px) for r, c in canvases}
        upscales = [scale for scale in scales.values() if scale >= 1]
        best = min(upscales) if upscales else max(scales.values())
        rows, columns = min((canvas for canvas in canvases if scales[canvas] == best), key=math.prod)
        return ImageTokens(rows * columns * self.tile_tokens, 1, rows * columns, rows, columns)


@dataclass(frozen=True, slots=True)
class Splits:
    """SmolVLM and Idefics3: scaled to a longest side, then to whole tiles; with an overview if there are several."""

    tile_px: int
    """Side length of a tile."""
    tile_tokens: int
    """Tokens of a tile."""
    longest_px: int
    """Length to which the longer side is scaled, up or down."""
    upper_px: int = 4096
    """Maximum length of a side after scaling."""

    def count(self, width_px: int, height_px: int, *, images: int = 1) -> ImageTokens:
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
        """Scale to the longest side, with the other one even; then below the upper bound."""
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
"""Rules of the published models; other sizes of a family use other arguments of the same rule."""


def _best_resolution(width_px: int, height_px: int, resolutions: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The resolution that keeps most of an image, and among those wastes the least."""

    def gain(resolution: tuple[int, int]) -> tuple[int, int]:
        height, width = resolution
        scale = min(width / width_px, height / height_px)
        used = min(int(width_px * scale) * int(height_px * scale), width_px * height_px)
        return used, used - width * height

    return max(resolutions, key=gain)


def _require_positive(width_px: int, height_px: int, images: int) -> None:
    if min(width_px, height_px) < 1:
        raise ValueError(f"an image of {width_px} by {height_px} px; both sides must be at least 1")
    if images < 1:
        raise ValueError(f"{images} images; must be at least 1")
