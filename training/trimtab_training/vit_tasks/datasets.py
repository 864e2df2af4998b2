"""Four tasks of grey 32×32 images, cut from what lies inside installed packages. Nothing is downloaded.

crops: of which photo is this a piece? digits: which digit? turned: which digit, turned by up to 60°, dark or light?
faces: is this a face? Train and held-out images share no source: photos are split by columns, digits by the image they
were written in, faces by portrait.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, interpolate

from trimtab_training.digits.datasets import Split, load_datasets

SIDE_PX: Final = 32
PHOTOS: Final = (
    "astronaut",
    "brick",
    "camera",
    "cell",
    "chelsea",
    "clock",
    "coffee",
    "coins",
    "grass",
    "gravel",
    "hubble_deep_field",
    "immunohistochemistry",
    "moon",
    "retina",
    "rocket",
    "text",
)
"""Names in ``skimage.data`` of photos that lie inside scikit-image's wheel, in the order of their labels."""
CROP_PX: Final = 64
"""Pixels a side of a held-out crop, before it is made smaller."""
TRAINING_CROPS_PX: Final = (48, 56, 64, 72, 80)
TRAINING_COLUMNS: Final = 0.65
"""Of each half of a photo, the share of columns from the left that training may see."""
LEAST_CONTRAST: Final = 6.0
"""Standard deviation, in grey levels, below which a crop shows nothing and is drawn anew."""
MOST_TURN_DEGREES: Final = 60.0
HELD_OUT_ORDER_SEED: Final = 29
"""Held-out digits are stored by source and label: the first thousand as they lie are not what the others are."""


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """Images and what is right about each.

    Attributes:
        pixels: uint8 [n, 1, 32, 32].
        labels: int64 [n].
    """

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def crops(split: Split, count: int, seed: int) -> Images:
    """Draw crops of photos, as many of each."""
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
        pixels[torch.from_numpy(rows)] = _to_side(torch.from_numpy(drawn))
    return Images(pixels, labels)


def digits(split: Split, count: int, seed: int) -> Images:
    """Draw digits, light on dark, moved by up to two pixels; held out, each of them once."""
    return _written(split, count, seed, turned=False)


def turned(split: Split, count: int, seed: int) -> Images:
    """Draw digits turned by up to 60°, half of them dark on light; held out, each of them once."""
    return _written(split, count, seed, turned=True)


def faces(split: Split, count: int, seed: int) -> Images:
    """Draw portraits and pieces of background, mirrored and moved in training; held out, each of the 80 once."""
    from skimage.data import lfw_subset  # noqa: PLC0415  (optional extra, and slow to import)

    portraits = torch.from_numpy(lfw_subset()).float()[:, None]
    labels = (torch.arange(200) < 100).long()
    order = torch.from_numpy(np.random.default_rng(7).permutation(200))
    chosen = order[:120] if split == "train" else order[120:]
    if split == "train":
        random = torch.Generator().manual_seed(seed)
        chosen = chosen[torch.randint(len(chosen), (count,), generator=random)]
        drawn = _moved(portraits[chosen], random, turn_degrees=10, move=0.08, zoom=0.15)
        mirrored = torch.rand(count, generator=random) < 0.5
        drawn[mirrored] = drawn[mirrored].flip(-1)
    else:
        drawn = portraits[chosen]
    large = interpolate(drawn, (SIDE_PX, SIDE_PX), mode="bilinear", align_corners=False)
    return Images(_bytes(large), labels[chosen])


TASKS: Final[Mapping[str, Callable[[Split, int, int], Images]]] = {
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


def _written(split: Split, count: int, seed: int, *, turned: bool) -> Images:
    sources = load_datasets(split)
    random = torch.Generator().manual_seed(seed)
    if split == "held-out":
        order = np.random.default_rng(HELD_OUT_ORDER_SEED).permutation(len(sources.labels))
        chosen = torch.from_numpy(order[:count])
    else:
        chosen = torch.randint(len(sources.labels), (count,), generator=random)
    glyphs = torch.from_numpy(sources.glyphs)[chosen][:, None]
    wide = torch.nn.functional.pad(glyphs, (2, 2, 2, 2))
    moved = _moved(wide, random, turn_degrees=MOST_TURN_DEGREES if turned else 0, move=0.12, zoom=0.1)
    if turned:
        dark = torch.rand(len(chosen), generator=random) < 0.5
        moved[dark] = 1 - moved[dark]
    noisy = 0.8 * moved + 0.1 + 0.03 * torch.randn(moved.shape, generator=random)
    return Images(_bytes(noisy), torch.from_numpy(sources.labels)[chosen])


def _moved(images: Tensor, random: torch.Generator, *, turn_degrees: float, move: float, zoom: float) -> Tensor:
    """Turn, move and zoom each image by chance, up to the given amounts; `move` is a share of half a side."""
    count = len(images)

    def drawn(most: float) -> Tensor:
        return (2 * torch.rand(count, generator=random) - 1) * most

    angle, scale = torch.deg2rad(drawn(turn_degrees)), 1 + drawn(zoom)
    cosine, sine = angle.cos() * scale, angle.sin() * scale
    rows = [torch.stack([cosine, -sine, drawn(move)], 1), torch.stack([sine, cosine, drawn(move)], 1)]
    grid = affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    return grid_sample(images, grid, padding_mode="border", align_corners=False)


def _bytes(images: Tensor) -> Tensor:
    return (255 * images).clamp(0, 255).round().to(torch.uint8)


def _to_side(squares: Tensor) -> Tensor:
    small = interpolate(squares[:, None].float(), (SIDE_PX, SIDE_PX), mode="bilinear", antialias=True)
    return small.clamp(0, 255).round().to(torch.uint8)


def _crop(photo: NDArray[np.uint8], split: Split, size: int, random: np.random.Generator) -> NDArray[np.uint8]:
    half = photo.shape[1] // 2
    border = round(half * TRAINING_COLUMNS)
    first, end = (0, border) if split == "train" else (border, half)
    while True:
        left = int(random.integers(2)) * half + int(random.integers(first, end - size + 1))
        top = int(random.integers(0, photo.shape[0] - size + 1))
        piece = photo[top : top + size, left : left + size]
        if piece.std() >= LEAST_CONTRAST:
            return piece[:, ::-1] if split == "train" and random.random() < 0.5 else piece


@cache
def _photo(name: str) -> NDArray[np.uint8]:
    from skimage import data  # noqa: PLC0415  (optional extra)

    photo = np.asarray(getattr(data, name)())
    grey = photo if photo.ndim == 2 else photo[..., :3] @ np.array([0.299, 0.587, 0.114])
    shrink = 2 if min(grey.shape) > 1024 else 1
    return np.ascontiguousarray(grey[::shrink, ::shrink].astype(np.uint8))
