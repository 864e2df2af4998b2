"""What every source of payloads makes: requests with what is true of them, and how much of an answer is right."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from trimtab_protocol import Tensor

Outputs = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """One request: its input tensors, and what is true of it (None where nothing is known)."""

    inputs: tuple[Tensor, ...]
    truth: object = None


@dataclass(frozen=True, slots=True)
class Score:
    """How much of an answer is right; the accuracy over many answers is Σ correct / Σ total."""

    correct: int = 0
    total: int = 0
