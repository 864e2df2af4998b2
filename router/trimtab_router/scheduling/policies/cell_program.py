"""`CellProgram`: the best schedule of many jobs by job index and time cell, then in exact seconds.

Time is divided into cells, and durations are rounded up to them, so that every schedule found is feasible. The fastest
option of each job shifts the origin of the cells instead of taking cells and so is never rounded: if a schedule serves
every job, it is found. The slack that rounding left is then spent in exact seconds.
"""

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from trimtab_pipelines.row_splits import Integers
from trimtab_router.scheduling.policies.schedule_table import DROPPED, SECONDS_ROUNDING, ProgramStep, ValueTable

CELLS = (256, 4096)  # bounds of the number of cells
MAX_CELL_OPTIONS = 400_000  # bound of cells times options
MIN_STEP_SECONDS = 0.00002
_SPARE_TIME_ROUNDS = 12
_CELLS_ROUNDING = 1e-9  # tolerance for sums of seconds at a cell's edge, in cells


def steps_by_cells(table: ValueTable, start: float, cells: int | None = None) -> Sequence[ProgramStep]:
    """Return the steps of the best schedule; `cells` up to the last deadline, by default as many as are affordable."""
    program = CellProgram(table, start, cells or _cells(table, start))
    true_times = _TrueTimeSchedule(table, program.solve(), start)
    true_times.use_spare_time()
    return true_times.steps


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


class CellProgram:
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
