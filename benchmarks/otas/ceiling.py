"""The most utility that any policy could have: a linear program above all of them, on the same arrivals.

Batches are relaxed to fractions of seconds. A query costs at each point at least its least share of any batch there;
the server gives the seconds of a slot to whoever may use that slot; a query may use all slots that its time from
arrival to deadline touches. A policy's batches keep all of this, since they begin after their queries came and those
that count end by their deadlines. So no policy is above the optimum, and slots only widen what a query may use.

Seconds and points part: what a group of like queries is given in all its slots is spent on points.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.otas.cells import Source, requests_of
from benchmarks.otas.load import Requests
from benchmarks.otas.measured import Cell
from benchmarks.otas.paper import FULL_BATCH, GAMMAS, QUERIES, Option, Query
from trimtab_adapter.solvers import highs
from trimtab_adapter.solvers.milp import MilpModel, Rows

SLOT_SECONDS = 0.05
SOLVE_SECONDS = 300.0
Window = tuple[int, int]
"""The first and the last slot that queries may use."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The most utility that the queries of a cell allow, by the paper's list."""

    cell: Cell
    utility: float


def ceiling(source: Source, cell: Cell) -> Ceiling:
    """Bound what any method could have of a cell's queries."""
    return Ceiling(cell, most_utility(requests_of(source, cell), GAMMAS))


def most_utility(
    queries: Requests, options: Sequence[Option], kinds: Sequence[Query] = QUERIES, slot_seconds: float = SLOT_SECONDS
) -> float:
    """A bound of utility times accuracy, over all queries in time, of one server that runs these points."""
    groups = _groups(queries, kinds, slot_seconds)
    built = MilpModel([], [], Rows(), ())
    in_slots: dict[int, list[int]] = {}
    given = {window: _seconds(built, window, slot_seconds, in_slots) for window in dict.fromkeys(w for w, _ in groups)}
    for columns in in_slots.values():
        built.rows.add(dict.fromkeys(columns, 1.0), upper=slot_seconds)
    costs = [(option, _least_seconds(option)) for option in options]
    spent: dict[Window, dict[int, float]] = {window: dict.fromkeys(columns, -1.0) for window, columns in given.items()}
    for (window, kind), count in groups.items():
        answered = {built.column(_worth(kinds[kind], option), count): cost for option, cost in costs}
        built.rows.add(dict.fromkeys(answered, 1.0), upper=count)
        spent[window] |= answered
    for entries in spent.values():
        built.rows.add(entries, upper=0.0)
    return highs.maximize(built, SOLVE_SECONDS)


def _groups(queries: Requests, kinds: Sequence[Query], slot_seconds: float) -> Mapping[tuple[Window, int], int]:
    """How many queries are of each type and may use the same slots."""
    patience = np.array([kind.seconds for kind in kinds])[queries.types]
    first = (queries.at_seconds // slot_seconds).astype(int)
    last = ((queries.at_seconds + patience) // slot_seconds).astype(int)
    windows = zip(first.tolist(), last.tolist(), strict=True)
    return Counter(zip(windows, queries.types.tolist(), strict=True))


def _seconds(built: MilpModel, window: Window, most: float, in_slots: dict[int, list[int]]) -> list[int]:
    """Columns of the seconds that queries of a window are given, one a slot."""
    columns = []
    for slot in range(window[0], window[1] + 1):
        columns.append(built.column(0.0, most))
        in_slots.setdefault(slot, []).append(columns[-1])
    return columns


def _least_seconds(option: Option) -> float:
    return min(option.seconds(rows) / rows for rows in range(1, FULL_BATCH + 1))


def _worth(kind: Query, option: Option) -> float:
    return kind.utility * option.accuracy[kind.task]
