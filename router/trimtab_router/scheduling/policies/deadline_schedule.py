"""Best schedule of all waiting jobs on one server: an option for each job, or to drop it.

By an exchange argument no schedule without gaps beats the order of deadlines, so a dynamic program over the jobs finds
the best (`deadline_program`). Every deadline bounds its own prefix of the jobs. The slack that rounding left is then
spent in exact seconds.

On several servers the order of deadlines is not optimal (the problem is strongly NP-hard): `assign_to_servers` gives
each job to the server that would end it first, and each server is then solved by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from trimtab_router.scheduling.policies.deadline_program import (
    DROPPED,
    DeadlineProgram,
    Job,
    JointOption,
    ProgramStep,
    ValueTable,
)

CELLS = (256, 4096)
"""Bounds of the number of cells."""
MAX_CELL_OPTIONS = 400_000
"""Bound of cells times options."""
_ROUNDS = 12
_ROUNDING = 1e-12
"""Seconds: tolerance for sums of seconds."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps in the order of deadlines, and the number of jobs served.

    `value` is the sum of the chosen options' values, less the price of their time.
    """

    steps: Sequence[ProgramStep]
    value: float
    served: int


def solve(
    jobs: Sequence[Job], start: float, *, price: float = 0.0, cells: int | None = None, strict: bool = False
) -> Schedule:
    """Choose an option for every job, in the order of deadlines.

    Args:
        jobs: by deadline.
        start: time at which the server is free.
        price: λ, value of a second of the server to later arrivals.
        cells: number of cells up to the last deadline; None for as many as `MAX_CELL_OPTIONS` allows.
        strict: whether ending exactly at the deadline is late.
    """
    if not jobs:
        return Schedule((), 0.0, 0)
    table = ValueTable(jobs, price)
    program = DeadlineProgram(table, start, cells or _cells(table, start), strict=strict)
    true_times = _TrueTimeSchedule(table, program.solve(), start, strict=strict)
    true_times.use_spare_time()
    served = [step for step in true_times.steps if step.option != DROPPED]
    value = sum(float(table.plain[step.row, step.option]) for step in served)
    return Schedule(true_times.steps, value, sum(step.jobs for step in served))


def assign_to_servers(jobs: Sequence[Job], free_at: Sequence[float]) -> list[list[int]]:
    """Assign each job to the server that would end it first at its fastest option.

    Args:
        jobs: by deadline.
        free_at: time at which each server is free.

    Returns:
        The indices of its jobs, for each server.
    """
    ends = list(free_at)
    shares: list[list[int]] = [[] for _ in free_at]
    for index, job in enumerate(jobs):
        server = min(range(len(ends)), key=ends.__getitem__)
        shares[server].append(index)
        seconds = float(job.seconds[0])
        if ends[server] + seconds <= job.deadline:
            ends[server] += seconds
    return shares


def load_factor(least_seconds: float, given_seconds: float) -> float:
    """Return the factor of the shadow price by load: just below one with the first waiting row, and rising.

    A constant price would give either every job or none a better option while the load is constant. It applies to a
    short queue too, because time spent on accuracy delays the rows that arrive meanwhile; the factor starts below one
    because the price assumes full batches.

    Args:
        least_seconds: of all waiting jobs at their fastest options.
        given_seconds: from the arrival of the most urgent job to its deadline.
    """
    return 0.85 + (8.0 * least_seconds / given_seconds if given_seconds > 0 else 0.0)


def options_of_step(jobs: Sequence[Job], step: ProgramStep) -> Job | JointOption:
    """Return the options that a step chose from."""
    job = jobs[step.first_job]
    return job if step.jobs == 1 else next(group for group in job.joint_options if group.jobs == step.jobs)


def _cells(table: ValueTable, start: float) -> int:
    fitting = int((table.seconds <= (table.deadline - start)[:, None]).sum())
    least_cells, max_cells = CELLS
    return min(max(MAX_CELL_OPTIONS // max(fitting, 1), least_cells), max_cells)


class _TrueTimeSchedule:
    """A schedule in exact seconds, which may use the slack that rounding to cells left."""

    def __init__(self, table: ValueTable, steps: Sequence[ProgramStep], start: float, *, strict: bool) -> None:
        self.steps = steps
        rows = [step.row for step in steps]
        self._table, self._rows = table, rows
        self._chosen = np.array([step.option for step in steps])
        self._room = table.deadline[rows] - start + (-_ROUNDING if strict else _ROUNDING)

    def use_spare_time(self) -> None:
        """Take the better option that adds most value, one after the other, while no job becomes late."""
        rows = np.arange(self._chosen.size)
        options, values = self._table.seconds[self._rows], self._table.values[self._rows]
        for _ in range(_ROUNDS):
            served = self._chosen != DROPPED
            taken = np.where(served, options[rows, self._chosen], 0.0)
            value = np.where(served, values[rows, self._chosen], 0.0)
            spare = self._room - taken.cumsum()
            behind = np.minimum.accumulate(np.where(served, spare, inf)[::-1])[::-1]
            room = np.minimum(spare, behind) + taken
            gain = np.where(options <= room[:, None], values - value[:, None], 0.0)
            row, option = divmod(int(gain.argmax()), gain.shape[1])
            if gain[row, option] <= _ROUNDING:
                break
            self._chosen[row] = option
        self.steps = [
            ProgramStep(step.row, step.first_job, step.jobs, option)
            for step, option in zip(self.steps, self._chosen.tolist(), strict=True)
        ]


__all__ = [
    "CELLS",
    "DROPPED",
    "Job",
    "JointOption",
    "ProgramStep",
    "Schedule",
    "assign_to_servers",
    "load_factor",
    "options_of_step",
    "solve",
]
