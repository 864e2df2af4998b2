"""Value by place in line and by moment: the dynamic program behind `schedule`. Pure.

Time is cut into cells, and what does not fit them exactly ends a little later than it would: what is found can always
be kept. Each job's fastest option moves the origin of the cells instead of taking some, and so is never rounded: a
schedule that serves everybody is found whenever there is one.

The best path is found again from the values alone, since each was made by the very addition that is repeated; pointers
back would have to be written in every cell, for a path that touches one a job.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
DROPPED = -1
LEAST_STEP_SECONDS = 0.00002
_ROUNDING = 1e-9
"""Of a cell: what an addition of seconds may be off without the next cell being meant."""


@dataclass(frozen=True, slots=True, eq=False)
class JointOption:
    """Options for a job and those next in line as one batch, which ends by the first one's deadline.

    Attributes:
        jobs: how many, at least 2.
        seconds: of each option, ascending. Shape (options,).
        values: of each option, all jobs together, ascending. Shape (options,).
        least: of their worth, the share that the first option gives; the others give all of it.
    """

    jobs: int
    seconds: Floats
    values: Floats
    least: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What waits, and how it may be served.

    Attributes:
        deadline: the moment by which it must be done.
        seconds: of each option, ascending. Shape (options,), at least one.
        values: of each option, ascending. Shape (options,).
        worth: of serving it at all, above whatever its options are worth; 0 where values say all.
        together: options that serve those after it as well.
        least: of its worth, the share that the first option gives; the others give all of it.
    """

    deadline: float
    seconds: Floats
    values: Floats
    worth: float = 0.0
    together: Sequence[JointOption] = ()
    least: float = 1.0


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """What was chosen for the job at a place, or for so many from it on together: an option, or DROPPED.

    `row` is where its options stand in the table.
    """

    row: int
    place: int
    jobs: int
    option: int


class ValueTable:
    """All options of all jobs side by side: a row for each job, then one for each group that may go together.

    Args:
        jobs: by deadline, at least one.
        price: value of a second.
    """

    def __init__(self, jobs: Sequence[Job], price: float) -> None:
        led = [(place, group) for place, job in enumerate(jobs) for group in job.together]
        self.begin = [*range(len(jobs)), *(place for place, _ in led)]
        self.end = [*range(1, len(jobs) + 1), *(place + group.jobs for place, group in led)]
        sides: list[Job | JointOption] = [*jobs, *(group for _, group in led)]
        sizes = np.array([side.seconds.size for side in sides])
        there = np.arange(sizes.max()) < sizes[:, None]
        self.seconds, self.values = np.full(there.shape, inf), np.full(there.shape, -inf)
        self.seconds[there] = np.concatenate([side.seconds for side in sides])
        self.values[there] = np.concatenate([side.values for side in sides])
        if price:
            self.values[there] -= price * self.seconds[there]
        self.plain = self.values
        """Values without worth, shape (rows, options); where there is no option -inf, and the seconds inf."""
        self.jobs = jobs
        worths = np.cumsum([0.0, *(job.worth for job in jobs)])
        if worths[-1]:
            weight = self._weight(min(job.worth for job in jobs if job.worth > 0))
            own = weight * (worths[self.end] - worths[self.begin])
            self.values = self.plain + own[:, None]
            self.values[:, 0] -= own * (1.0 - np.array([side.least for side in sides]))
        self.deadline = np.array([jobs[place].deadline for place in self.begin])

    def _weight(self, least: float) -> float:
        """What makes serving the least worthy job outweigh all that options can add together."""
        lowest = np.where(self.plain == -inf, 0.0, self.plain).min(axis=1)
        spread = np.maximum(self.plain.max(axis=1), 0.0) - np.minimum(lowest, 0.0)
        return 1.001 * float(spread.sum()) / least

    @cached_property
    def rows_from(self) -> list[list[int]]:
        """The rows whose first job stands at each place."""
        rows: list[list[int]] = [[] for _ in self.jobs]
        for row, begin in enumerate(self.begin):
            rows[begin].append(row)
        return rows


class DeadlineProgram:
    """Values by place in line and by cell: all before are done `cell · step + late` seconds after the start.

    Args:
        table: the options.
        start: the moment at which the server is free.
        cells: up to the last deadline.
        strict: whether to end at the very deadline is too late.
    """

    def __init__(self, table: ValueTable, start: float, cells: int, *, strict: bool) -> None:
        horizon = max(float(table.deadline[len(table.jobs) - 1]) - start, 0.0)
        self._table = table
        self._step = max(horizon / cells, LEAST_STEP_SECONDS)
        self._cells = int(horizon / self._step) + 2 + len(table.jobs)  # to drop a job takes up to one
        ends = np.concatenate([[0.0], table.seconds[: len(table.jobs), 0].cumsum()])
        self._late = ends - np.floor(ends / self._step + _ROUNDING) * self._step
        # Before each row as many cells that nothing reaches: every option reads a window of it, wherever it begins.
        self._padded = np.full((ends.size, 2 * self._cells), -inf)
        self._padded[0, self._cells] = 0.0
        row, cell = self._padded.strides
        shape = (ends.size, self._cells + 1, self._cells)
        self._windows = as_strided(self._padded, shape, (row, cell, cell), writeable=False)
        self._took, self._useful = self._in_cells(start, strict=strict)
        self._options: list[Integers] = [useful.nonzero()[0] for useful in self._useful]
        self._dropping: list[int] = (
            np.ceil((self._late[:-1] - self._late[1:]) / self._step - _ROUNDING).astype(int).tolist()
        )

    def _in_cells(self, start: float, *, strict: bool) -> tuple[Integers, NDArray[np.bool_]]:
        """The cells each option takes, and which options fit and are worth more than any that takes no more."""
        table, step = self._table, self._step
        late = self._late[table.end]
        cells = np.ceil((table.seconds + (self._late[table.begin] - late)[:, None]) / step - _ROUNDING)
        last = (table.deadline - start - late) / step
        last = np.ceil(last - _ROUNDING) - 1 if strict else np.floor(last + _ROUNDING)
        self._limit: list[int] = np.clip(last, -1, self._cells - 1).astype(int).tolist()
        values = table.values
        useful = cells <= np.minimum(last, self._cells - 1)[:, None]
        useful[:, 1:] &= values[:, 1:] > np.maximum.accumulate(values, axis=1)[:, :-1]
        useful[:, :-1] &= (cells[:, :-1] != cells[:, 1:]) | (values[:, :-1] >= values[:, 1:])
        return np.where(useful, cells, 0.0).astype(np.int64), useful

    def solved(self) -> list[ProgramStep]:
        """The best steps along the line."""
        reached = [0] * (len(self._table.jobs) + 1)
        for place, rows in enumerate(self._table.rows_from):
            reached[place + 1] = max(reached[place + 1], self._drop(place, reached[place]))
            for row in rows:
                end = self._table.end[row]
                reached[end] = max(reached[end], self._serve(row, place, end, reached[place]))
        return self._traced()

    def _drop(self, place: int, reached: int) -> int:
        """Go on without a job; returns the last cell that may be reached."""
        late = self._dropping[place]
        width = reached + late + 1
        into = self._padded[place + 1, self._cells : self._cells + width]
        np.maximum(into, self._windows[place, self._cells - late, :width], out=into)
        return reached + late

    def _serve(self, row: int, begin: int, end: int, reached: int) -> int:
        """Serve the jobs of a row by the best of its options; returns the last cell that may be reached."""
        options = self._options[row]
        if not options.size:
            return 0
        took = self._took[row, options]
        width = min(self._limit[row], reached + int(took[-1])) + 1
        found = self._windows[begin, :, :width][self._cells - took]
        found += self._table.values[row, options][:, None]
        into = self._padded[end, self._cells : self._cells + width]
        np.maximum(into, found.max(axis=0), out=into)
        return width - 1

    def _traced(self) -> list[ProgramStep]:
        table, place = self._table, len(self._table.jobs)
        rows_into: list[list[int]] = [[] for _ in range(place + 1)]
        for row, end in enumerate(table.end):
            rows_into[end].append(row)
        cell = int(np.argmax(self._padded[place, self._cells :]))
        steps: list[ProgramStep] = []
        while place:
            step, took = self._step_into(rows_into[place], place, cell)
            steps.append(step)
            place, cell = step.place, cell - took
        return steps[::-1]

    def _step_into(self, rows: Sequence[int], place: int, cell: int) -> tuple[ProgramStep, int]:
        """The step by which the value of a cell came about, and the cells it took."""
        value, before = self._padded[place, self._cells + cell], self._cells + cell
        if self._padded[place - 1, before - self._dropping[place - 1]] == value:
            return ProgramStep(place - 1, place - 1, 1, DROPPED), self._dropping[place - 1]
        for row in rows:
            begin, options = self._table.begin[row], self._options[row]
            took = self._took[row, options]
            came = self._padded[begin, np.maximum(before - took, 0)] + self._table.values[row, options] == value
            option = int(came.argmax()) if came.size else 0
            if came.size and came[option]:
                return ProgramStep(row, begin, place - begin, int(options[option])), int(took[option])
        raise AssertionError("every value in the grid came by some step")  # pragma: no cover
