"""`ResultLine`: the last line of a command, with its figures and thresholds as JSON."""

import sys
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict

Direction = Literal["<=", ">=", "=="]


class Threshold(BaseModel):
    """A threshold: the value reached, its bound, and whether it holds."""

    model_config = ConfigDict(frozen=True)

    bar: str
    value: float
    bound: str
    holds: bool


def threshold(name: str, value: float, direction: Direction, bound: float) -> Threshold:
    holds = {"<=": value <= bound, ">=": value >= bound, "==": value == bound}[direction]
    return Threshold(bar=name, value=value, bound=f"{direction} {bound:g}", holds=holds)


class ResultLine(BaseModel):
    """Name of a command, its figures with units in their names, and its thresholds."""

    model_config = ConfigDict(frozen=True)

    name: str
    figures: Mapping[str, float | int | str | None]
    bars: tuple[Threshold, ...] = ()

    @property
    def holds(self) -> bool:
        return all(bar.holds for bar in self.bars)

    def print(self) -> None:
        sys.stdout.write(self.model_dump_json() + "\n")
        sys.stdout.flush()
