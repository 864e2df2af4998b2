"""Held-out images of all tasks as labelled samples.

Used as ``--samples trimtab_training.vit_tasks.labelled_samples:HeldOut``.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trimtab_training.vit_tasks.datasets import TASKS

SEED: Final = 2
MOST: Final = 1_000
"""Of one task; there are no more than 80 faces and pieces of background."""


class HeldOut:
    """Images that nothing was trained or tuned on, task after task."""

    def __init__(self) -> None:
        found = [draw("held-out", MOST, SEED) for draw in TASKS.values()]
        self._pixels = np.concatenate([images.pixels.numpy() for images in found])
        self._labels = np.concatenate([images.labels.numpy() for images in found])
        self._names = list(TASKS)
        self._tasks = np.repeat(np.arange(len(found)), [len(images) for images in found])

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[dict[str, NDArray[Any]], dict[str, int]]:
        """Return an image with the number of its task, and its label."""
        return {"image": self._pixels[index], "task": self._tasks[index]}, {"label": int(self._labels[index])}

    def task(self, index: int) -> str:
        """Name the task of an image."""
        return self._names[int(self._tasks[index])]
