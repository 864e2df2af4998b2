"""Upper bound of the utility of any policy: a linear program on the same arrivals.

Batches are relaxed to fractions of seconds. A query costs at each point at least its least share of any batch there;
the server gives the seconds of a slot to the queries that may use that slot; a query may use all slots that its time
from arrival to deadline touches. A policy's batches meet all of this, since they begin after their queries arrived, and
those that count end by their deadlines. So no policy exceeds the optimum, and slots only widen what a query may use.

Seconds and points are separate: what a group of equal queries is given in all its slots is spent on points.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.papers.one_stage import FULL_BATCH
from benchmarks.papers.otas_model import QUERIES, Option, Query, Requests
from trimtab_adapter.solvers import highs
from trimtab_adapter.solvers.milp import MilpModel, Rows

SLOT_SECONDS = 0.05
SOLVE_SECONDS = 300.0
Window = tuple[int, int]
"""The first and the last slot that queries may use."""


def max_utility(
    requests: Requests, options: Sequence[Option], kinds: Sequence[Query] = QUERIES, slot_seconds: float = SLOT_SECONDS
) -> float:
    """Bound utility times accuracy over all queries in time, of one server that runs these options."""
    groups = _group(requests, kinds, slot_seconds)
    model = MilpModel([], [], Rows(), ())
    columns_of_slot: dict[int, list[int]] = {}
    seconds_of = {
        window: _add_seconds(model, window, slot_seconds, columns_of_slot)
        for window in dict.fromkeys(window for window, _ in groups)
    }
    for columns in columns_of_slot.values():
        model.rows.add(dict.fromkeys(columns, 1.0), upper=slot_seconds)
    costs = [(option, min(option.seconds(rows) / rows for rows in range(1, FULL_BATCH + 1))) for option in options]
    spent: dict[Window, dict[int, float]] = {
        window: dict.fromkeys(columns, -1.0) for window, columns in seconds_of.items()
    }
    for (window, kind), count in groups.items():
        query = kinds[kind]
        answered = {
            model.column(query.utility * option.accuracy[query.task], count): seconds for option, seconds in costs
        }
        model.rows.add(dict.fromkeys(answered, 1.0), upper=count)
        spent[window] |= answered
    for entries in spent.values():
        model.rows.add(entries, upper=0.0)
    return highs.maximize(model, SOLVE_SECONDS)


def _group(requests: Requests, kinds: Sequence[Query], slot_seconds: float) -> Mapping[tuple[Window, int], int]:
    """Count the queries of each type that may use the same slots."""
    patience = np.array([kind.seconds for kind in kinds])[requests.types]
    first = (requests.at_seconds // slot_seconds).astype(int)
    last = ((requests.at_seconds + patience) // slot_seconds).astype(int)
    windows = zip(first.tolist(), last.tolist(), strict=True)
    return Counter(zip(windows, requests.types.tolist(), strict=True))


def _add_seconds(
    model: MilpModel, window: Window, slot_seconds: float, columns_of_slot: dict[int, list[int]]
) -> list[int]:
    """Add a column for each slot of a window: the seconds that the window's queries are given there."""
    columns = []
    for slot in range(window[0], window[1] + 1):
        columns.append(model.column(0.0, slot_seconds))
        columns_of_slot.setdefault(slot, []).append(columns[-1])
    return columns
