"""Held-out images of all tasks as labelled samples: `--samples trimtab_training.vit_tasks.labelled_samples:HeldOut`."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trimtab_training.vit_tasks.datasets import TASKS

SEED: Final = 2
MAX_PER_TASK: Final = 1_000
"""Images per task; `faces` has 80."""


class HeldOut:
    """Held-out images, task after task."""

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
