"""Best schedule of all waiting jobs on one server: an option for each job, or to drop it.

By an exchange argument no schedule without gaps beats the order of deadlines, so a dynamic program over the jobs finds
the best. Every deadline bounds its own prefix of the jobs. Few jobs are solved exactly (`label_program`), many by time
cells (`cell_program`).

On several servers the order of deadlines is not optimal (the problem is strongly NP-hard): `assign_to_servers` gives
each job to the server that would end it first, and each server is then solved by itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trimtab_router.scheduling.policies.cell_program import steps_by_cells
from trimtab_router.scheduling.policies.label_program import steps_by_labels
from trimtab_router.scheduling.policies.schedule_table import DROPPED, Job, ProgramStep, ValueTable

MAX_LABELED_JOBS, MAX_LABELED_OPTIONS = 6, 200
"""Bounds of the jobs, and of their options together, that are solved exactly: the paths multiply with each."""


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
    `cells`: number of cells up to the last deadline; None for an exact schedule of few jobs, or as many as are
    affordable.
    """
    if not jobs:
        return Schedule((), 0.0, 0)
    table = ValueTable(jobs, price)
    is_small = cells is None and len(jobs) <= MAX_LABELED_JOBS and table.values.size <= MAX_LABELED_OPTIONS
    steps = steps_by_labels(table, start) if is_small else steps_by_cells(table, start, cells)
    served = [step for step in steps if step.option != DROPPED]
    value = sum(float(table.plain[step.row, step.option]) for step in served)
    return Schedule(steps, value, sum(step.jobs for step in served))


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
