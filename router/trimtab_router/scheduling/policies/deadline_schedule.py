"""Best schedule of all waiting jobs on one server: an option for each job, or to drop it.

By an exchange argument no schedule without gaps beats the order of deadlines, so a dynamic program over the jobs finds
the best: the best value by job index and time cell. Every deadline bounds its own prefix of the jobs.

Time is divided into cells, and durations are rounded up to them, so that every schedule found is feasible. The fastest
option of each job shifts the origin of the cells instead of taking cells and so is never rounded: if a schedule serves
every job, it is found. The slack that rounding left is then spent in exact seconds.

On several servers the order of deadlines is not optimal (the problem is strongly NP-hard): `assign_to_servers` gives
each job to the server that would end it first, and each server is then solved by itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
DROPPED = -1
CELLS = (256, 4096)  # bounds of the number of cells
MAX_CELL_OPTIONS = 400_000  # bound of cells times options
MIN_STEP_SECONDS = 0.00002
_SPARE_TIME_ROUNDS = 12
SECONDS_ROUNDING = 1e-12  # tolerance for sums of seconds
_CELLS_ROUNDING = 1e-9  # tolerance for sums of seconds at a cell's edge, in cells


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
    """Of `value` that the first option earns; every other option earns all of it."""


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
    """Options of jobs, by deadline: a row for each job, then for each joint option. `price`: value of a second."""

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
        self.plain = self.values  # without `Job.value`, less the price of time; (rows, options), -inf: none
        self.jobs = jobs
        cumulative_values = np.cumsum([0.0, *(job.value for job in jobs)])
        if cumulative_values[-1]:
            weight = _value_weight(self.plain, min(job.value for job in jobs if job.value > 0))
            own = weight * (cumulative_values[self.end] - cumulative_values[self.begin])
            self.values = self.plain + own[:, None]
            self.values[:, 0] -= own * (1.0 - np.array([column.first_share for column in columns]))
        self.deadline = np.array([jobs[index].deadline for index in self.begin])

    @cached_property
    def rows_from(self) -> list[list[int]]:
        rows: list[list[int]] = [[] for _ in self.jobs]
        for row, begin in enumerate(self.begin):
            rows[begin].append(row)
        return rows


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps in the order of deadlines, the number of jobs served, and their options' values less the price of time."""

    steps: Sequence[ProgramStep]
    value: float
    served: int


def solve(jobs: Sequence[Job], start: float, *, price: float = 0.0, cells: int | None = None) -> Schedule:
    """Choose an option for every job, in the order of deadlines.

    `start`: time at which the server is free.
    `price`: λ, value of a second of the server to later arrivals.
    `cells`: number of cells up to the last deadline; None for as many as `MAX_CELL_OPTIONS` allows.
    """
    if not jobs:
        return Schedule((), 0.0, 0)
    if len(jobs) == 1 and not jobs[0].joint_options:
        return _solve_one(jobs[0], start, price)
    table = ValueTable(jobs, price)
    program = DeadlineProgram(table, start, cells or _cells(table, start))
    true_times = _TrueTimeSchedule(table, program.solve(), start)
    true_times.use_spare_time()
    served = [step for step in true_times.steps if step.option != DROPPED]
    value = sum(float(table.plain[step.row, step.option]) for step in served)
    return Schedule(true_times.steps, value, sum(step.jobs for step in served))


def _solve_one(job: Job, start: float, price: float) -> Schedule:
    """Choose the most valuable option in time, which needs no cells."""
    plain = job.values - price * job.seconds
    values = np.where(job.seconds <= job.deadline - start + SECONDS_ROUNDING, plain, -inf)
    if job.value:
        own = _value_weight(plain[None], job.value) * job.value
        values[0] += own * job.first_share
        values[1:] += own
    best = int(values.argmax())
    if values[best] <= 0.0:
        return Schedule((ProgramStep(0, 0, 1, DROPPED),), 0.0, 0)
    return Schedule((ProgramStep(0, 0, 1, best),), float(plain[best]), 1)


def _value_weight(plain: Floats, least_value: float) -> float:
    """Return the factor by which serving the least valuable job outweighs all option values together."""
    lowest = np.where(plain == -inf, 0.0, plain).min(axis=1)
    spread = np.maximum(plain.max(axis=1), 0.0) - np.minimum(lowest, 0.0)
    return 1.001 * float(spread.sum()) / least_value


def assign_to_servers(jobs: Iterable[tuple[float, float]], free_at: Sequence[float]) -> list[list[int]]:
    """Return the indices of each server's jobs, which have least seconds and a deadline: the first free one's."""
    ends = list(free_at)
    shares: list[list[int]] = [[] for _ in free_at]
    for index, (seconds, deadline) in enumerate(jobs):
        server = min(range(len(ends)), key=ends.__getitem__)
        shares[server].append(index)
        if ends[server] + seconds <= deadline:
            ends[server] += seconds
    return shares


def load_factor(least_seconds: float, given_seconds: float) -> float:
    """Return the factor of the shadow price by load: just below one with the first waiting row, and rising.

    `least_seconds` are those of all waiting jobs at their fastest options, `given_seconds` last from the arrival of the
    most urgent job to its deadline. A constant price would give either every job or none a better option while the load
    is constant. It applies to a short queue too, because time spent on accuracy delays the rows that arrive meanwhile;
    the factor starts below one because the price assumes full batches.
    """
    return 0.85 + (8.0 * least_seconds / given_seconds if given_seconds > 0 else 0.0)


def _cells(table: ValueTable, start: float) -> int:
    fitting = int((table.seconds <= (table.deadline - start)[:, None]).sum())
    least_cells, max_cells = CELLS
    return min(max(MAX_CELL_OPTIONS // max(fitting, 1), least_cells), max_cells)


class _TrueTimeSchedule:
    """A schedule in exact seconds, which may use the slack that rounding to cells left."""

    def __init__(self, table: ValueTable, steps: Sequence[ProgramStep], start: float) -> None:
        self.steps = steps
        rows = [step.row for step in steps]
        self._table, self._rows = table, rows
        self._chosen = np.array([step.option for step in steps])
        self._room = table.deadline[rows] - start + SECONDS_ROUNDING

    def use_spare_time(self) -> None:
        """Take the better option that adds most value, one after the other, while no job becomes late."""
        rows = np.arange(self._chosen.size)
        options, values = self._table.seconds[self._rows], self._table.values[self._rows]
        for _ in range(_SPARE_TIME_ROUNDS):
            served = self._chosen != DROPPED
            taken = np.where(served, options[rows, self._chosen], 0.0)
            value = np.where(served, values[rows, self._chosen], 0.0)
            spare = self._room - taken.cumsum()
            behind = np.minimum.accumulate(np.where(served, spare, inf)[::-1])[::-1]
            room = np.minimum(spare, behind) + taken
            gain = np.where(options <= room[:, None], values - value[:, None], 0.0)
            row, option = divmod(int(gain.argmax()), gain.shape[1])
            if gain[row, option] <= SECONDS_ROUNDING:
                break
            self._chosen[row] = option
        self.steps = [
            ProgramStep(step.row, step.first_job, step.jobs, option)
            for step, option in zip(self.steps, self._chosen.tolist(), strict=True)
        ]


class DeadlineProgram:
    """Values by job index and cell: all jobs before the index end `cell · step + offset` seconds after the start.

    The best path is recovered from the values alone, by repeating the addition that produced each. Back pointers would
    have to be written for every cell, although the path visits one cell a job.
    """

    def __init__(self, table: ValueTable, start: float, cells: int) -> None:
        horizon = max(float(table.deadline[len(table.jobs) - 1]) - start, 0.0)
        self._table = table
        self._step = max(horizon / cells, MIN_STEP_SECONDS)
        self._cells = int(horizon / self._step) + 2 + len(table.jobs)  # dropping a job takes up to one cell
        ends = np.concatenate([[0.0], table.seconds[: len(table.jobs), 0].cumsum()])
        self._offsets = ends - np.floor(ends / self._step + _CELLS_ROUNDING) * self._step
        # Unreachable cells precede each row, so that every option reads a window of the same width.
        self._table_values = np.full((ends.size, 2 * self._cells), -inf)
        self._table_values[0, self._cells] = 0.0
        row, cell = self._table_values.strides
        shape = (ends.size, self._cells + 1, self._cells)
        self._windows = as_strided(self._table_values, shape, (row, cell, cell), writeable=False)
        self._cells_taken, self._useful = self._in_cells(start)
        self._options: list[Integers] = [useful.nonzero()[0] for useful in self._useful]
        self._drop_cells: list[int] = (
            np.ceil((self._offsets[:-1] - self._offsets[1:]) / self._step - _CELLS_ROUNDING).astype(int).tolist()
        )

    def _in_cells(self, start: float) -> tuple[Integers, NDArray[np.bool_]]:
        """Return the cells of each option, and which fit and beat every option of no more cells."""
        table, step = self._table, self._step
        offset = self._offsets[table.end]
        cells = np.ceil((table.seconds + (self._offsets[table.begin] - offset)[:, None]) / step - _CELLS_ROUNDING)
        last = (table.deadline - start - offset) / step
        last = np.floor(last + _CELLS_ROUNDING)
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
