"""Queues of requests of two tasks and many utilities, as a policy sees them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tests.router import test_queue
from trimtab_router.scheduling.policies.interface import Escalation, Point, SchedulerView
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.stage_request import RowSlice, StageRequest

TASKS = ("cars", "birds")
ROW_MS = {"few": 1.0, "some": 1.5, "all": 2.0, "more": 3.0}
ACCURACY = {"few": (0.60, 0.70), "some": (0.80, 0.85), "all": (0.90, 0.90), "more": (0.95, 0.92)}


def a_point(name: str, looks: Sequence[Escalation] = (), row_ms: float | None = None) -> Point:
    row = (row_ms or ROW_MS[name]) / 1000
    seconds = tuple(row * (2 + rows) for rows in range(1, 33))
    accuracy = dict(zip(TASKS, ACCURACY[name], strict=True))
    return Point(
        name, float(np.mean(ACCURACY[name])), lambda rows: row * (2 + rows), None, accuracy, seconds, tuple(looks)
    )


POINTS = tuple(a_point(name) for name in ("more", "all", "some", "few"))


def a_work(
    deadline: float, *, utility: float = 1.0, task: str = "cars", rows: int = 1, at: float = 0.0, floor: float = 0.0
) -> StageRequest:
    work: StageRequest = test_queue.a_work(rows, deadline, now=at, utility=utility, task=task, floor=floor)
    return work


def a_view(
    works: Iterable[StageRequest],
    *,
    points: Sequence[Point] = POINTS,
    now: float = 0.0,
    arrivals_rps: float = 0.0,
    loaded: str = "",
    **changes: Any,
) -> SchedulerView:
    queue = DeadlineQueue(100_000)
    for work in works:
        queue.push(RowSlice(work, 0, work.rows))
    rate, point = (lambda: arrivals_rps), ("", loaded)
    return SchedulerView(now, queue, points, 32, 0.0, "Predicted", arrivals_rps=rate, loaded_point=point, **changes)


def a_random_view(rng: np.random.Generator, rows: int, points: Sequence[Point]) -> SchedulerView:
    utilities = rng.choice([0.01, 0.2, 0.3, 1.0], rows)
    deadlines = np.sort(rng.uniform(0.05, 1.0, rows)) * rows * 0.0015
    works = [
        a_work(float(d), utility=float(u), task=str(rng.choice(TASKS)))
        for d, u in zip(deadlines, utilities, strict=True)
    ]
    return a_view(works, points=points, arrivals_rps=float(rng.uniform(0, 1000)))


def eight_points() -> tuple[Point, ...]:
    names = ("few", "some", "all", "more")
    return tuple(replace(a_point(names[n // 2], row_ms=0.6 + 0.3 * n), name=f"point-{n}") for n in reversed(range(8)))
