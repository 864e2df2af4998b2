"""Queries: images of three tasks with known labels, each with a deadline and a utility, as the paper's table II.

The task whose answers are worth most is the one the transformer learned from; half of the queries are patient and worth
little.
"""

from dataclasses import dataclass

import numpy as np

from trimtab_loadtester.payloads.interface import Outputs, Payload, Score
from trimtab_protocol import Tensor
from trimtab_protocol.extensions import TASK, UTILITY
from trimtab_training.vit_tasks.datasets import TASKS, Images
from trimtab_training.vit_tasks.labelled_samples import MAX_PER_TASK, SEED


@dataclass(frozen=True, slots=True)
class Query:
    """A type of query: `patience` is its deadline as a multiple of the shortest."""

    task: str
    patience: float
    utility: float


QUERIES = (
    Query("digits", 1.0, 0.3),
    Query("digits", 5 / 3, 0.01),
    Query("crops", 1.0, 1.0),
    Query("crops", 5 / 3, 0.2),
    Query("faces", 1.0, 0.3),
    Query("faces", 5 / 3, 0.01),
)
NUMBERS = {task: number for number, task in enumerate(TASKS)}


class Queries:
    """Held-out images in an order drawn once, all types alike.

    Args:
        deadline_seconds: of those in a hurry.
        seed: of types and images.
    """

    def __init__(self, deadline_seconds: float, seed: int = 0) -> None:
        self._deadline_seconds = deadline_seconds
        self._seed = seed
        self._images: dict[str, Images] = {
            task: TASKS[task]("held-out", MAX_PER_TASK, SEED) for task in {query.task for query in QUERIES}
        }

    def kind(self, index: int) -> int:
        """Which type a query has."""
        return int(np.random.default_rng([self._seed, index]).integers(len(QUERIES)))

    def seconds(self, kind: int) -> float:
        """A type's deadline."""
        return self._deadline_seconds * QUERIES[kind].patience

    def payload(self, index: int) -> Payload:
        """Make one: an image, its task, and what it wishes."""
        kind = self.kind(index)
        query = QUERIES[kind]
        images = self._images[query.task]
        row = int(np.random.default_rng([self._seed, index, 1]).integers(len(images)))
        inputs = (
            Tensor.of("image", images.pixels[row : row + 1].numpy()),
            Tensor.of("task", np.array([NUMBERS[query.task]], np.int64)),
        )
        wishes: dict[str, str | int | float] = {
            "timeout": round(1e6 * self.seconds(kind)),
            TASK: query.task,
            UTILITY: query.utility,
        }
        return Payload(inputs, int(images.labels[row]), wishes)

    def score(self, truth: object, outputs: Outputs) -> Score:
        """Whether the label is right; KeyError where the answer has none."""
        return Score(int(int(outputs["label"].reshape(-1)[0]) == truth), 1)
