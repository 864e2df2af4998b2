"""Payloads with ground truth, and scores of answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.stages import IMAGES_INPUT
from trimtab_protocol import Tensor

Outputs = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """A request: input tensors, ground truth (None if unknown), and request options."""

    inputs: tuple[Tensor, ...]
    truth: object = None
    parameters: Mapping[str, str | int | float] = field(default_factory=dict)

    @property
    def images(self) -> int:
        """How many images of a chat it shows."""
        return sum(tensor.array.size for tensor in self.inputs if tensor.name == IMAGES_INPUT)


@dataclass(frozen=True, slots=True)
class Score:
    """How much of an answer is right; the accuracy over many answers is Σ correct / Σ total.

    `right`, where truth is known row by row: whether each is. Shape [rows].
    """

    correct: int = 0
    total: int = 0
    right: NDArray[np.bool_] | None = field(default=None, compare=False)
