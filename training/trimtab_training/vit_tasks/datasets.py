"""Four tasks of grey 32×32 images from installed packages; nothing is downloaded.

crops: the photo of a crop. digits: the digit. turned: the digit, rotated by up to 60°, dark or light. faces: face or
background. Train and held-out images share no source: photos are split by columns, digits by source image, faces by
portrait.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, interpolate

from trimtab_training.digits.datasets import PHOTOS as PAGE_PHOTOS
from trimtab_training.digits.datasets import Split, load_datasets, load_grey_photo
from trimtab_training.task_training import LabelledImages

SIDE_PX: Final = 32
PHOTOS: Final = tuple(sorted((*PAGE_PHOTOS, "cell", "clock", "retina", "text")))
"""Names in `skimage.data`, in the order of labels."""
CROP_PX: Final = 64
"""Side of a held-out crop before it is resized."""
TRAINING_CROPS_PX: Final = (48, 56, 64, 72, 80)
TRAINING_COLUMNS: Final = 0.65
"""Share of columns of each half of a photo, from the left, that training uses."""
MIN_CONTRAST: Final = 6.0
"""Standard deviation, in grey levels, below which a crop is drawn again."""
MAX_TURN_DEGREES: Final = 60.0
SEED: Final = 2
"""Seed of held-out images."""
MAX_PER_TASK: Final = 1_000
"""Held-out images per task; `faces` has 80."""
HELD_OUT_ORDER_SEED: Final = 29
"""Seed of the order of held-out digits, which are stored by source and label."""


def crops(split: Split, count: int, seed: int) -> LabelledImages:
    """Draw crops of photos, equally many of each."""
    random = np.random.default_rng(seed)
    sizes = TRAINING_CROPS_PX if split == "train" else (CROP_PX,)
    pixels = torch.empty((count, 1, SIDE_PX, SIDE_PX), dtype=torch.uint8)
    labels = torch.arange(count) % len(PHOTOS)
    size_of = random.choice(sizes, count)
    for size in sizes:
        rows = np.flatnonzero(size_of == size)
        if not len(rows):
            continue
        drawn = np.stack([_crop(_photo(PHOTOS[int(labels[row])]), split, int(size), random) for row in rows])
        pixels[torch.from_numpy(rows)] = _resize(torch.from_numpy(drawn))
    return LabelledImages(pixels, labels)


def digits(split: Split, count: int, seed: int) -> LabelledImages:
    """Draw digits, light on dark, shifted by up to two pixels; held-out digits are drawn once each."""
    return _draw_digits(split, count, seed, turned=False)


def turned(split: Split, count: int, seed: int) -> LabelledImages:
    """Draw rotated digits, half of them dark on light; held-out digits are drawn once each."""
    return _draw_digits(split, count, seed, turned=True)


def faces(split: Split, count: int, seed: int) -> LabelledImages:
    """Draw portraits and background patches, augmented in training; the 80 held-out ones are drawn once each."""
    from skimage.data import lfw_subset  # noqa: PLC0415  (optional extra, and slow to import)

    portraits = torch.from_numpy(lfw_subset()).float()[:, None]
    labels = (torch.arange(200) < 100).long()
    order = torch.from_numpy(np.random.default_rng(7).permutation(200))
    indices = order[:120] if split == "train" else order[120:]
    if split == "train":
        random = torch.Generator().manual_seed(seed)
        indices = indices[torch.randint(len(indices), (count,), generator=random)]
        drawn = _augment(portraits[indices], random, turn_degrees=10, move=0.08, zoom=0.15)
        mirrored = torch.rand(count, generator=random) < 0.5
        drawn[mirrored] = drawn[mirrored].flip(-1)
    else:
        drawn = portraits[indices]
    large = interpolate(drawn, (SIDE_PX, SIDE_PX), mode="bilinear", align_corners=False)
    return LabelledImages(_to_bytes(large), labels[indices])


TASKS: Final[Mapping[str, Callable[[Split, int, int], LabelledImages]]] = {
    "crops": crops,
    "digits": digits,
    "turned": turned,
    "faces": faces,
}
CLASSES: Final[Mapping[str, tuple[str, ...]]] = {
    "crops": PHOTOS,
    "digits": tuple("0123456789"),
    "turned": tuple("0123456789"),
    "faces": ("background", "face"),
}


class HeldOut:
    """Held-out images of all tasks as labelled samples: `--samples trimtab_training.vit_tasks.datasets:HeldOut`."""

    def __init__(self) -> None:
        drawn = [draw("held-out", MAX_PER_TASK, SEED) for draw in TASKS.values()]
        self._pixels = np.concatenate([images.pixels.numpy() for images in drawn])
        self._labels = np.concatenate([images.labels.numpy() for images in drawn])
        self._names = list(TASKS)
        self._tasks = np.repeat(np.arange(len(drawn)), [len(images) for images in drawn])

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[dict[str, NDArray[Any]], dict[str, int]]:
        return {"image": self._pixels[index], "task": self._tasks[index]}, {"label": int(self._labels[index])}

    def task(self, index: int) -> str:
        return self._names[int(self._tasks[index])]


def _draw_digits(split: Split, count: int, seed: int, *, turned: bool) -> LabelledImages:
    handwriting = load_datasets(split)
    random = torch.Generator().manual_seed(seed)
    if split == "held-out":
        order = np.random.default_rng(HELD_OUT_ORDER_SEED).permutation(len(handwriting.labels))
        indices = torch.from_numpy(order[:count])
    else:
        indices = torch.randint(len(handwriting.labels), (count,), generator=random)
    glyphs = torch.from_numpy(handwriting.glyphs)[indices][:, None]
    wide = torch.nn.functional.pad(glyphs, (2, 2, 2, 2))
    shifted = _augment(wide, random, turn_degrees=MAX_TURN_DEGREES if turned else 0, move=0.12, zoom=0.1)
    if turned:
        dark = torch.rand(len(indices), generator=random) < 0.5
        shifted[dark] = 1 - shifted[dark]
    noisy = 0.8 * shifted + 0.1 + 0.03 * torch.randn(shifted.shape, generator=random)
    return LabelledImages(_to_bytes(noisy), torch.from_numpy(handwriting.labels)[indices])


def _augment(images: Tensor, random: torch.Generator, *, turn_degrees: float, move: float, zoom: float) -> Tensor:
    """Rotate, shift and scale each image at random, up to the given amounts; `move` is a share of half a side."""
    count = len(images)

    def uniform(bound: float) -> Tensor:
        return (2 * torch.rand(count, generator=random) - 1) * bound

    angle, scale = torch.deg2rad(uniform(turn_degrees)), 1 + uniform(zoom)
    cosine, sine = angle.cos() * scale, angle.sin() * scale
    rows = [torch.stack([cosine, -sine, uniform(move)], 1), torch.stack([sine, cosine, uniform(move)], 1)]
    grid = affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    return grid_sample(images, grid, padding_mode="border", align_corners=False)


def _to_bytes(images: Tensor) -> Tensor:
    return (255 * images).clamp(0, 255).round().to(torch.uint8)


def _resize(squares: Tensor) -> Tensor:
    resized = interpolate(squares[:, None].float(), (SIDE_PX, SIDE_PX), mode="bilinear", antialias=True)
    return resized.clamp(0, 255).round().to(torch.uint8)


def _crop(photo: NDArray[np.uint8], split: Split, size: int, random: np.random.Generator) -> NDArray[np.uint8]:
    half = photo.shape[1] // 2
    border = round(half * TRAINING_COLUMNS)
    first, end = (0, border) if split == "train" else (border, half)
    while True:
        left = int(random.integers(2)) * half + int(random.integers(first, end - size + 1))
        top = int(random.integers(0, photo.shape[0] - size + 1))
        crop = photo[top : top + size, left : left + size]
        if crop.std() >= MIN_CONTRAST:
            return crop[:, ::-1] if split == "train" and random.random() < 0.5 else crop


@cache
def _photo(name: str) -> NDArray[np.uint8]:
    grey = load_grey_photo(name)
    shrink = 2 if min(grey.shape) > 1024 else 1
    return np.ascontiguousarray(grey[::shrink, ::shrink].astype(np.uint8))
