"""Random queues for the schedule solver, and slower truths beside it."""

import itertools
from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.row_splits import Floats, ParetoFront, SplitOption, cheapest_batches, pareto_fronts
from trimtab_router.scheduling.policies.deadline_schedule import Schedule
from trimtab_router.scheduling.policies.schedule_table import DROPPED, Job

ACCURACIES = {"A": 0.519, "V": 0.261, "T": 0.423, "AV": 0.591, "AT": 0.782, "VT": 0.547, "AVT": 0.798}
MILLISECONDS = {"A": 6.9, "V": 23.9, "T": 3.3, "AV": 34.1, "AT": 7.9, "VT": 27.3, "AVT": 39.8}
"""Of 64 rows: three senses of unequal price and worth."""


def senses(most_rows: int = 64) -> list[ParetoFront]:
    ways = [
        SplitOption(name, ACCURACIES[name], cheapest_batches(batch_seconds(name), most_rows).seconds)
        for name in ACCURACIES
    ]
    return pareto_fronts(ways, most_rows)


def batch_seconds(name: str) -> list[float]:
    """Seconds of a batch of 1, 2, … 64 rows: a fifth of a full one is fixed."""
    return [MILLISECONDS[name] / 1000 * (0.2 + 0.8 * rows / 64) for rows in range(1, 65)]


def a_queue(
    rng: np.random.Generator, jobs: int, sizes: Sequence[ParetoFront], load: float, worth: float = 0.0
) -> list[Job]:
    """Jobs of random sizes whose deadlines leave `load` of their middling options' time, spread unevenly."""
    drawn = [sizes[int(rng.integers(1, len(sizes)))] for _ in range(jobs)]
    typical = float(sum(np.median(front.seconds) for front in drawn)) / load
    deadlines = np.sort(rng.uniform(0.05, 1.0, jobs)) * typical + rng.uniform(0, 0.02)
    return [
        Job(float(deadline), front.seconds, front.accuracy * front.rows[0].sum(), worth * float(front.rows[0].sum()))
        for deadline, front in zip(deadlines, drawn, strict=True)
    ]


def a_queue_of_batches(rng: np.random.Generator, batches: int, points: int = 8, load: float = 2.0) -> list[Job]:
    seconds = np.linspace(0.02, 0.09, points)
    accuracy = np.sort(rng.uniform(0.5, 0.95, points))
    deadlines = np.sort(rng.uniform(0.05, 1.0, batches)) * batches * 0.055 / load
    return [
        Job(float(deadline), seconds * rng.uniform(0.3, 1.0), accuracy * 32 * rng.choice([0.01, 0.2, 0.3, 1.0]))
        for deadline in deadlines
    ]


def exact(
    jobs: Sequence[Job], start: float = 0.0, price: float = 0.0, *, served_first: bool = False
) -> tuple[float, float]:
    """The best value, by every (end, value) that no other beats; lexicographic in worth where that goes first."""
    ends, worths, values = np.array([start]), np.zeros(1), np.zeros(1)
    for job in jobs:
        more = ends[:, None] + job.seconds[None]
        fits = more <= job.deadline + 1e-12
        worth = (worths[:, None] + np.full(job.seconds.size, job.value if served_first else 0.0)[None])[fits]
        value = (values[:, None] + (job.values - price * job.seconds)[None])[fits]
        ends = np.concatenate([ends, more[fits]])
        worths, values = np.concatenate([worths, worth]), np.concatenate([values, value])
        order = np.lexsort((-values, -worths, ends))
        ends, worths, values = ends[order], worths[order], values[order]
        kept = _rising(worths, values)
        ends, worths, values = ends[kept], worths[kept], values[kept]
    best = np.lexsort((values, worths))[-1]
    return float(worths[best]), float(values[best])


def _rising(worths: Floats, values: Floats) -> NDArray[np.intp]:
    if not worths.any():
        best = np.maximum.accumulate(values)
        return np.flatnonzero(np.concatenate([[True], best[1:] > best[:-1]]))
    kept, top = [], (-inf, -inf)
    for place, pair in enumerate(zip(worths.tolist(), values.tolist(), strict=True)):
        if pair > top:
            kept.append(place)
            top = pair
    return np.array(kept)


def brute_force(jobs: Sequence[Job], start: float = 0.0, *, strict: bool = False) -> float:
    best = 0.0
    for choice in itertools.product(*(range(-1, job.seconds.size) for job in jobs)):
        end, value = start, 0.0
        for option, job in zip(choice, jobs, strict=True):
            if option < 0:
                continue
            end += float(job.seconds[option])
            if end > job.deadline + 1e-12 or (strict and end > job.deadline - 1e-12):
                break
            value += float(job.values[option])
        else:
            best = max(best, value)
    return best


def all_can_be_served(jobs: Sequence[Job], start: float = 0.0) -> bool:
    ends = start + np.cumsum([float(job.seconds.min()) for job in jobs])
    return bool((ends <= np.array([job.deadline for job in jobs])).all())


def kept(jobs: Sequence[Job], schedule: Schedule, start: float = 0.0) -> float:
    end, value, place = start, 0.0, 0
    for step in schedule.steps:
        assert step.first_job == place
        if step.option != DROPPED:
            joint = {group.jobs: group for group in jobs[place].joint_options}
            options = jobs[place] if step.jobs == 1 else joint[step.jobs]
            end += float(options.seconds[step.option])
            value += float(options.values[step.option])
            assert end <= jobs[place].deadline + 1e-9
        place += step.jobs
    assert place == len(jobs)
    return value
