"""Best schedule of few jobs, exactly: of all paths up to a job, those worth more than every path that ends earlier."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from trimtab_pipelines.row_splits import Floats, Integers
from trimtab_router.scheduling.policies.schedule_table import (
    DROPPED,
    SECONDS_ROUNDING,
    ProgramStep,
    ValueTable,
    increases,
)

_VALUE_ROUNDING = 1e-12  # tolerance for sums of values


@dataclass(slots=True, eq=False)
class _Arrivals:
    """Paths extended by the options of a row of the table, or by dropping a job; late ones end at infinity."""

    row: int
    ends: Floats
    """Seconds from the start. Shape (paths, options)."""
    values: Floats


@dataclass(slots=True, eq=False)
class _Paths:
    """The paths up to one job: each is worth more than all that end earlier."""

    ends: Floats
    """Ascending. Shape (paths,)."""
    values: Floats
    origins: Integers
    """Index of each path in `arrivals`, one after the other."""
    arrivals: Sequence[_Arrivals]


def steps_by_labels(table: ValueTable, start: float) -> list[ProgramStep]:
    """Return the steps of the best schedule."""
    arrivals: list[list[_Arrivals]] = [[] for _ in range(len(table.jobs) + 1)]
    room = table.deadline - start + SECONDS_ROUNDING
    paths = [_Paths(np.zeros(1), np.zeros(1), np.zeros(1, np.int64), ())]
    for index, rows in enumerate(table.rows_from):
        ends, values = paths[index].ends[:, None], paths[index].values[:, None]
        arrivals[index + 1].append(_Arrivals(DROPPED, ends, values))
        for row in rows:
            later = ends + table.seconds[row]
            later[later > room[row]] = inf
            arrivals[table.end[row]].append(_Arrivals(row, later, values + table.values[row]))
        paths.append(_undominated(arrivals[index + 1]))
    return _trace_steps(table, paths)


def _undominated(arrivals: Sequence[_Arrivals]) -> _Paths:
    ends = np.concatenate([each.ends.ravel() for each in arrivals])
    values = np.concatenate([each.values.ravel() for each in arrivals])
    order = ends.argsort(kind="stable")
    order = order[: ends[order].searchsorted(inf)]
    order = order[increases(values[order], _VALUE_ROUNDING)]
    return _Paths(ends[order], values[order], order, arrivals)


def _trace_steps(table: ValueTable, paths: Sequence[_Paths]) -> list[ProgramStep]:
    """Return the steps of the last path, which is worth most."""
    steps: list[ProgramStep] = []
    index, path = len(paths) - 1, -1
    while index:
        origin = int(paths[index].origins[path])
        for each in paths[index].arrivals:
            if origin < each.ends.size:
                break
            origin -= each.ends.size
        path, option = divmod(origin, each.ends.shape[1])
        if each.row == DROPPED:
            steps.append(ProgramStep(index - 1, index - 1, 1, DROPPED))
        else:
            begin = table.begin[each.row]
            steps.append(ProgramStep(each.row, begin, index - begin, option))
        index = steps[-1].first_job
    return steps[::-1]
