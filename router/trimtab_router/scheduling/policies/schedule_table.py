"""Jobs of a schedule with their options, and `ValueTable`: the options of all jobs as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.row_splits import Floats

DROPPED = -1
SECONDS_ROUNDING = 1e-12  # tolerance for sums of seconds


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


def _value_weight(plain: Floats, least_value: float) -> float:
    """Return the factor by which serving the least valuable job outweighs all option values together."""
    lowest = np.where(plain == -inf, 0.0, plain).min(axis=1)
    spread = np.maximum(plain.max(axis=1), 0.0) - np.minimum(lowest, 0.0)
    return 1.001 * float(spread.sum()) / least_value


def increases(values: Floats, rounding: float) -> NDArray[np.bool_]:
    """Return which values are greater than all before them by more than `rounding`; the first one is."""
    result = np.ones(values.size, np.bool_)
    np.greater(values[1:], np.maximum.accumulate(values)[:-1] + rounding, out=result[1:])
    return result
