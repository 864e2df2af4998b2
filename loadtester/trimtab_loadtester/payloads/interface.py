"""Payloads with ground truth, and scores of responses."""

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
        """Number of images of a chat."""
        return sum(tensor.array.size for tensor in self.inputs if tensor.name == IMAGES_INPUT)


@dataclass(frozen=True, slots=True)
class Score:
    """Score of a response; the accuracy over many responses is Σ correct / Σ total."""

    correct: int = 0
    total: int = 0
    row_correct: NDArray[np.bool_] | None = field(default=None, compare=False)
    """[rows], if the truth is known by row."""
