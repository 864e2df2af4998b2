"""`OptionTable`: the options of one stage as arrays of figures; an `Option` is created when it is read.

A stage has hundreds of options, of which a solver reads the figures and a plan takes one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.solvers.program import Option

Floats = NDArray[np.float64]
_FIGURES = attrgetter("latency_seconds", "value", "batch_size", "penalty", "cores", "gpus", "cost")
PLACEMENTS: Mapping[bool | None, float] = {True: 1.0, False: 0.0, None: -1.0}
"""Numbers of `Option.disaggregated`."""


@dataclass(frozen=True, slots=True)
class OptionFigures:
    """What solvers read of options; arrays of shape [options]."""

    seconds: Floats
    value: Floats
    batch_size: Floats
    penalty: Floats
    disaggregated: Floats
    """1: disaggregated; 0: colocated; -1: fits both."""
    uses: Floats
    """Of each limit of the program, of shape [limits, options]."""

    @classmethod
    def of(cls, options: Sequence[Option], flavors: Sequence[str]) -> Self:
        """Figures of options; `flavors` are the limited ones."""
        figures = np.array([*map(_FIGURES, options)], dtype=np.float64).reshape(-1, 7).T
        seconds, value, batch_size, penalty, *used = figures
        used += [np.array([option.flavors.get(name, 0.0) for option in options]) for name in flavors]
        placements = np.array([PLACEMENTS[option.disaggregated] for option in options])
        return cls(seconds, value, batch_size, penalty, placements, np.array(used))

    def join(self, other: Self) -> Self:
        both = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return type(self)(*(np.concatenate(pair, axis=-1) for pair in both))


class OptionTable(Sequence[Option]):
    """Options with their figures. `create` returns the option of an index."""

    def __init__(self, figures: OptionFigures, create: Callable[[int], Option]) -> None:
        self.figures = figures
        self._create = create
        self._created: dict[int, Option] = {}

    def __len__(self) -> int:
        return self.figures.value.size

    def __getitem__(self, index: Any) -> Any:
        number = range(len(self))[index]
        if number not in self._created:
            self._created[number] = self._create(number)
        return self._created[number]

    def with_option(self, option: Option, flavors: Sequence[str]) -> "OptionTable":
        """These options and one more."""
        last = len(self)
        figures = self.figures.join(OptionFigures.of([option], flavors))
        return OptionTable(figures, lambda number: option if number == last else self[number])


def figures_of(options: Sequence[Option], flavors: Sequence[str]) -> OptionFigures:
    return options.figures if isinstance(options, OptionTable) else OptionFigures.of(options, flavors)
