"""The best choice for every waiting job on one server: an option of it, or to drop it. Pure.

In the order of deadlines no schedule without gaps is beaten (exchange argument), so a dynamic program over jobs finds
the best: the most value by the moment at which the server has done with all decided so far (`grid`). Each deadline
bounds its own prefix, not one of them all. What the grid's rounding left over is then spent, with true times.

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
"""Of time up to the last deadline: the least and the most."""
MAX_CELL_OPTIONS = 400_000
"""Cells times options: as many cells as that allows."""
_ROUNDS = 12
_ROUNDING = 1e-12
"""Seconds: what sums of seconds may be off."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps along the line, one for each job or for each group that goes together, and what they are worth.

    `value` is the sum of the chosen options' values, less the price of their time.
    """

    steps: Sequence[ProgramStep]
    value: float
    served: int


def solve(
    jobs: Sequence[Job], start: float, *, price: float = 0.0, cells: int | None = None, strict: bool = False
) -> Schedule:
    """Choose for every job, in the order of deadlines.

    Args:
        jobs: by deadline, the earliest first.
        start: the moment at which the server is free, the predicted end of what it runs.
        price: λ, value that a second of the server is worth to those who are yet to come.
        cells: of time up to the last deadline, more being slower and nearer to the best; None for as many as there is
            time for.
        strict: whether to end at the very deadline is too late.
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
    """Give each job to the server that would end it first, at its fastest; who is too late everywhere goes there too.

    Args:
        jobs: by deadline.
        free_at: the moment at which each server is free.

    Returns:
        The places of its jobs, for each server.
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
    """How many times its price time costs, by what waits: nearly once from the first on, and rising.

    One price for all would serve either everybody at a better option or nobody, as long as load does not change, so it
    rises with what waits. It is due before anybody waits, too: what an empty queue spends on accuracy, those miss who
    come while it is spent. Then it is a little less than the price, which knows full batches only.

    Args:
        least_seconds: of all that waits, at its fastest.
        given_seconds: to a job, from when it comes to its deadline.
    """
    return 0.85 + (8.0 * least_seconds / given_seconds if given_seconds > 0 else 0.0)


def options_of_step(jobs: Sequence[Job], step: ProgramStep) -> Job | JointOption:
    """What was chosen among."""
    job = jobs[step.first_job]
    return job if step.jobs == 1 else next(group for group in job.joint_options if group.jobs == step.jobs)


def _cells(table: ValueTable, start: float) -> int:
    fitting = int((table.seconds <= (table.deadline - start)[:, None]).sum())
    least_cells, max_cells = CELLS
    return min(max(MAX_CELL_OPTIONS // max(fitting, 1), least_cells), max_cells)


class _TrueTimeSchedule:
    """The steps with true times: what each may still take without making anybody late."""

    def __init__(self, table: ValueTable, steps: Sequence[ProgramStep], start: float, *, strict: bool) -> None:
        self.steps = steps
        rows = [step.row for step in steps]
        self._table, self._rows = table, rows
        self._chosen = np.array([step.option for step in steps])
        self._room = table.deadline[rows] - start + (-_ROUNDING if strict else _ROUNDING)

    def use_spare_time(self) -> None:
        """Take the better option that adds most, one after the other, while there is room for any."""
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
