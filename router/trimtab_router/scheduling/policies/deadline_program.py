"""Dynamic program of `deadline_schedule`: best value by job index and time cell.

Time is divided into cells, and durations are rounded up to them, so that every schedule found is feasible. The fastest
option of each job shifts the origin of the cells instead of taking cells and so is never rounded: if a schedule serves
every job, it is found.

The best path is recovered from the values alone, by repeating the addition that produced each. Back pointers would have
to be written for every cell, although the path visits one cell a job.
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
"""Cells: tolerance for sums of seconds at a cell's edge."""


@dataclass(frozen=True, slots=True, eq=False)
class JointOption:
    """Options of a job and the jobs after it as one batch, due by the deadline of the first."""

    jobs: int
    """At least 2."""
    seconds: Floats
    """By option, ascending. Shape (options,)."""
    values: Floats
    """Of all jobs together, by option, ascending. Shape (options,)."""
    first_share: float = 1.0
    """Share of the jobs' `value` that the first option earns; every other option earns all of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A job to schedule and its options."""

    deadline: float
    seconds: Floats
    """By option, ascending. Shape (options,), at least one."""
    values: Floats
    """By option, ascending. Shape (options,)."""
    value: float = 0.0
    """Value of serving the job at all; it outweighs all option values. 0 if the option values are all that counts."""
    joint_options: Sequence[JointOption] = ()
    """Options that also serve the jobs after it."""
    first_share: float = 1.0
    """Share of `value` that the first option earns; every other option earns all of it."""


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One step of a schedule: the option of the job at `first_job`, or of `jobs` jobs from it on; DROPPED for none.

    `row` is the row of its options in the `ValueTable`.
    """

    row: int
    first_job: int
    jobs: int
    option: int


class ValueTable:
    """Options of all jobs as arrays: one row for each job, then one for each joint option.

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
        """Option values without `Job.value`, less the price of their time. Shape (rows, options), -inf if there is no
        option."""
        self.jobs = jobs
        cumulative_values = np.cumsum([0.0, *(job.value for job in jobs)])
        if cumulative_values[-1]:
            weight = self._weight(min(job.value for job in jobs if job.value > 0))
            own = weight * (cumulative_values[self.end] - cumulative_values[self.begin])
            self.values = self.plain + own[:, None]
            self.values[:, 0] -= own * (1.0 - np.array([column.first_share for column in columns]))
        self.deadline = np.array([jobs[index].deadline for index in self.begin])

    def _weight(self, least_value: float) -> float:
        """Return the factor by which serving the least valuable job outweighs all option values together."""
        lowest = np.where(self.plain == -inf, 0.0, self.plain).min(axis=1)
        spread = np.maximum(self.plain.max(axis=1), 0.0) - np.minimum(lowest, 0.0)
        return 1.001 * float(spread.sum()) / least_value

    @cached_property
    def rows_from(self) -> list[list[int]]:
        """Rows by the index of their first job."""
        rows: list[list[int]] = [[] for _ in self.jobs]
        for row, begin in enumerate(self.begin):
            rows[begin].append(row)
        return rows


class DeadlineProgram:
    """Values by job index and cell: all jobs before the index end `cell · step + offset` seconds after the start.

    Args:
        table: the options.
        start: time at which the server is free.
        cells: number of cells up to the last deadline.
        strict: whether ending exactly at the deadline is late.
    """

    def __init__(self, table: ValueTable, start: float, cells: int, *, strict: bool) -> None:
        horizon = max(float(table.deadline[len(table.jobs) - 1]) - start, 0.0)
        self._table = table
        self._step = max(horizon / cells, MIN_STEP_SECONDS)
        self._cells = int(horizon / self._step) + 2 + len(table.jobs)  # dropping a job takes up to one cell
        ends = np.concatenate([[0.0], table.seconds[: len(table.jobs), 0].cumsum()])
        self._offsets = ends - np.floor(ends / self._step + _ROUNDING) * self._step
        # Unreachable cells precede each row, so that every option reads a window of the same width.
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
        """Return the cells of each option, and which fit and beat every option of no more cells."""
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
        reached = [0] * (len(self._table.jobs) + 1)
        for index, rows in enumerate(self._table.rows_from):
            reached[index + 1] = max(reached[index + 1], self._drop(index, reached[index]))
            for row in rows:
                end = self._table.end[row]
                reached[end] = max(reached[end], self._serve(row, index, end, reached[index]))
        return self._trace_steps()

    def _drop(self, index: int, reached: int) -> int:
        """Skip a job; return the last cell that may be reached."""
        offset = self._drop_cells[index]
        width = reached + offset + 1
        target = self._table_values[index + 1, self._cells : self._cells + width]
        np.maximum(target, self._windows[index, self._cells - offset, :width], out=target)
        return reached + offset

    def _serve(self, row: int, begin: int, end: int, reached: int) -> int:
        """Serve the jobs of a row by its best option; return the last cell that may be reached."""
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
        """Return the step that produced the value of a cell, and the cells it took."""
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
