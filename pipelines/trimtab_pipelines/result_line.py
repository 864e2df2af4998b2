"""The last line every benchmark, demo and fault test prints: its figures, and which bars hold."""

import sys
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict

Direction = Literal["<=", ">=", "=="]


class Threshold(BaseModel):
    """One bar: the value reached, the bound asked for, and whether it holds."""

    model_config = ConfigDict(frozen=True)

    bar: str
    value: float
    bound: str
    holds: bool


def threshold(name: str, value: float, direction: Direction, bound: float) -> Threshold:
    """Compare a value with its bound."""
    holds = {"<=": value <= bound, ">=": value >= bound, "==": value == bound}[direction]
    return Threshold(bar=name, value=value, bound=f"{direction} {bound:g}", holds=holds)


class ResultLine(BaseModel):
    """A command's name, its figures with units in their names, and its bars."""

    model_config = ConfigDict(frozen=True)

    name: str
    figures: Mapping[str, float | int | str | None]
    bars: tuple[Threshold, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether every bar holds."""
        return all(bar.holds for bar in self.bars)

    def print(self) -> None:
        """Print the one line of JSON that ends a command."""
        sys.stdout.write(self.model_dump_json() + "\n")
        sys.stdout.flush()
