"""Payloads with ground truth, their sources, and scores of responses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.stages import IMAGES_INPUT
from trimtab_protocol import Tensor

Number = TypeVar("Number", int, float)
Outputs = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """A request: input tensors, ground truth (None if unknown), and request options."""

    inputs: tuple[Tensor, ...]
    truth: object = None
    parameters: Mapping[str, str | int | float] = field(default_factory=dict)

    @property
    def images(self) -> int:
        return sum(tensor.array.size for tensor in self.inputs if tensor.name == IMAGES_INPUT)


@dataclass(frozen=True, slots=True)
class Score:
    """Score of a response; the accuracy over many responses is Σ correct / Σ total."""

    correct: int = 0
    total: int = 0
    row_correct: NDArray[np.bool_] | None = field(default=None, compare=False)
    """[rows], if the truth is known by row."""
    row_labelled: NDArray[np.bool_] | None = field(default=None, compare=False)
    """[rows], whether a row has a truth; None if each has."""


class PayloadSource(Protocol):
    """Unbounded sequence of payloads, deterministic in seed and index."""

    def payload(self, index: int) -> Payload: ...

    def score(self, truth: object, outputs: Outputs) -> Score:
        """Compare outputs, by name, with the payload's truth; total is 0 without truth."""
        ...


def parse_options(kind: str, text: str, readers: Mapping[str, Callable[[str], Any]], example: str) -> dict[str, Any]:
    """Parse the options of an annotation, `NAME=VALUE, …`, each name once.

    Raises ValueError if an option is unknown or its value invalid.
    """
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or name not in readers or name in values:
            names = ", ".join(readers)
            raise ValueError(
                f"payloads {kind}: {part!r} is not one of {names}, each once; write for instance {example}"
            )
        try:
            values[name] = readers[name](value)
        except ValueError:
            raise ValueError(f"payloads {kind}: {name} cannot be {value!r}; write for instance {example}") from None
    return values


def parse_range(kind: Callable[[str], Number], text: str) -> tuple[Number, Number]:
    """Parse `MINIMUM..MAXIMUM`, or one number that is both."""
    minimum, dots, maximum = text.partition("..")
    return kind(minimum), kind(maximum if dots else minimum)
