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
MIN_STEP_SECONDS = 0.00002
_ROUNDING = 1e-9
"""Of a cell: what an addition of seconds may be off without the next cell being meant."""


@dataclass(frozen=True, slots=True, eq=False)
class JointOption:
    """Options for a job and those next in line as one batch, which ends by the first one's deadline."""

    jobs: int
    """How many, at least 2."""
    seconds: Floats
    """Of each option, ascending. Shape (options,)."""
    values: Floats
    """Of each option, all jobs together, ascending. Shape (options,)."""
    first_share: float = 1.0
    """Of their worth, the share that the first option gives; the others give all of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What waits, and how it may be served."""

    deadline: float
    """The moment by which it must be done."""
    seconds: Floats
    """Of each option, ascending. Shape (options,), at least one."""
    values: Floats
    """Of each option, ascending. Shape (options,)."""
    value: float = 0.0
    """Of serving it at all, above whatever its options are worth; 0 where values say all."""
    joint_options: Sequence[JointOption] = ()
    """Options that serve those after it as well."""
    first_share: float = 1.0
    """Of its worth, the share that the first option gives; the others give all of it."""


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """What was chosen for the job at a place, or for so many from it on together: an option, or DROPPED.

    `row` is where its options stand in the table.
    """

    row: int
    first_job: int
    jobs: int
    option: int


class ValueTable:
    """All options of all jobs side by side: a row for each job, then one for each group that may go together.

    Args:
        jobs: by deadline, at least one.
        price: value of a second.
    """

    def __init__(self, jobs: Sequence[Job], price: float) -> None:
        joint = [(index, group) for index, job in enumerate(jobs) for group in job.joint_options]
        self.begin = [*range(len(jobs)), *(index for index, _ in joint)]
        self.end = [*range(1, len(jobs) + 1), *(index + group.jobs for index, group in joint)]
        columns: list[Job | JointOption] = [*jobs, *(group for _, group in joint)]
        sizes = np.array([column.seconds.size for column in columns])
        present = np.arange(sizes.max()) < sizes[:, None]
        self.seconds, self.values = np.full(present.shape, inf), np.full(present.shape, -inf)
        self.seconds[present] = np.concatenate([column.seconds for column in columns])
        self.values[present] = np.concatenate([column.values for column in columns])
        if price:
            self.values[present] -= price * self.seconds[present]
        self.plain = self.values
        """Values without worth, shape (rows, options); where there is no option -inf, and the seconds inf."""
        self.jobs = jobs
        cumulative_values = np.cumsum([0.0, *(job.value for job in jobs)])
        if cumulative_values[-1]:
            weight = self._weight(min(job.value for job in jobs if job.value > 0))
            own = weight * (cumulative_values[self.end] - cumulative_values[self.begin])
            self.values = self.plain + own[:, None]
            self.values[:, 0] -= own * (1.0 - np.array([column.first_share for column in columns]))
        self.deadline = np.array([jobs[index].deadline for index in self.begin])

    def _weight(self, least_value: float) -> float:
        """What makes serving the least worthy job outweigh all that options can add together."""
        lowest = np.where(self.plain == -inf, 0.0, self.plain).min(axis=1)
        spread = np.maximum(self.plain.max(axis=1), 0.0) - np.minimum(lowest, 0.0)
        return 1.001 * float(spread.sum()) / least_value

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
        self._step = max(horizon / cells, MIN_STEP_SECONDS)
        self._cells = int(horizon / self._step) + 2 + len(table.jobs)  # to drop a index takes up to one
        ends = np.concatenate([[0.0], table.seconds[: len(table.jobs), 0].cumsum()])
        self._offsets = ends - np.floor(ends / self._step + _ROUNDING) * self._step
        # Before each row as many cells that nothing reaches: every option reads a window of it, wherever it begins.
        self._table_values = np.full((ends.size, 2 * self._cells), -inf)
        self._table_values[0, self._cells] = 0.0
        row, cell = self._table_values.strides
        shape = (ends.size, self._cells + 1, self._cells)
        self._windows = as_strided(self._table_values, shape, (row, cell, cell), writeable=False)
        self._cells_taken, self._useful = self._in_cells(start, strict=strict)
        self._options: list[Integers] = [useful.nonzero()[0] for useful in self._useful]
        self._drop_cells: list[int] = (
            np.ceil((self._offsets[:-1] - self._offsets[1:]) / self._step - _ROUNDING).astype(int).tolist()
        )

    def _in_cells(self, start: float, *, strict: bool) -> tuple[Integers, NDArray[np.bool_]]:
        """The cells each option takes, and which options fit and are worth more than any that takes no more."""
        table, step = self._table, self._step
        offset = self._offsets[table.end]
        cells = np.ceil((table.seconds + (self._offsets[table.begin] - offset)[:, None]) / step - _ROUNDING)
        last = (table.deadline - start - offset) / step
        last = np.ceil(last - _ROUNDING) - 1 if strict else np.floor(last + _ROUNDING)
        self._limit: list[int] = np.clip(last, -1, self._cells - 1).astype(int).tolist()
        values = table.values
        useful = cells <= np.minimum(last, self._cells - 1)[:, None]
        useful[:, 1:] &= values[:, 1:] > np.maximum.accumulate(values, axis=1)[:, :-1]
        useful[:, :-1] &= (cells[:, :-1] != cells[:, 1:]) | (values[:, :-1] >= values[:, 1:])
        return np.where(useful, cells, 0.0).astype(np.int64), useful

    def solve(self) -> list[ProgramStep]:
        """The best steps along the line."""
        reached = [0] * (len(self._table.jobs) + 1)
        for index, rows in enumerate(self._table.rows_from):
            reached[index + 1] = max(reached[index + 1], self._drop(index, reached[index]))
            for row in rows:
                end = self._table.end[row]
                reached[end] = max(reached[end], self._serve(row, index, end, reached[index]))
        return self._trace_steps()

    def _drop(self, index: int, reached: int) -> int:
        """Go on without a job; returns the last cell that may be reached."""
        offset = self._drop_cells[index]
        width = reached + offset + 1
        target = self._table_values[index + 1, self._cells : self._cells + width]
        np.maximum(target, self._windows[index, self._cells - offset, :width], out=target)
        return reached + offset

    def _serve(self, row: int, begin: int, end: int, reached: int) -> int:
        """Serve the jobs of a row by the best of its options; returns the last cell that may be reached."""
        options = self._options[row]
        if not options.size:
            return 0
        cells_taken = self._cells_taken[row, options]
        width = min(self._limit[row], reached + int(cells_taken[-1])) + 1
        totals = self._windows[begin, :, :width][self._cells - cells_taken]
        totals += self._table.values[row, options][:, None]
        target = self._table_values[end, self._cells : self._cells + width]
        np.maximum(target, totals.max(axis=0), out=target)
        return width - 1

    def _trace_steps(self) -> list[ProgramStep]:
        table, index = self._table, len(self._table.jobs)
        rows_into: list[list[int]] = [[] for _ in range(index + 1)]
        for row, end in enumerate(table.end):
            rows_into[end].append(row)
        cell = int(np.argmax(self._table_values[index, self._cells :]))
        steps: list[ProgramStep] = []
        while index:
            step, cells_taken = self._step_into(rows_into[index], index, cell)
            steps.append(step)
            index, cell = step.first_job, cell - cells_taken
        return steps[::-1]

    def _step_into(self, rows: Sequence[int], index: int, cell: int) -> tuple[ProgramStep, int]:
        """The step by which the value of a cell came about, and the cells it took."""
        value, before = self._table_values[index, self._cells + cell], self._cells + cell
        if self._table_values[index - 1, before - self._drop_cells[index - 1]] == value:
            return ProgramStep(index - 1, index - 1, 1, DROPPED), self._drop_cells[index - 1]
        for row in rows:
            begin, options = self._table.begin[row], self._options[row]
            cells_taken = self._cells_taken[row, options]
            matches = (
                self._table_values[begin, np.maximum(before - cells_taken, 0)] + self._table.values[row, options]
                == value
            )
            option = int(matches.argmax()) if matches.size else 0
            if matches.size and matches[option]:
                return ProgramStep(row, begin, index - begin, int(options[option])), int(cells_taken[option])
        raise AssertionError("every value in the grid came by some step")  # pragma: no cover
