"""Queues of requests of two tasks and many utilities, as a policy sees them."""

import numpy as np

from tests.router.test_queue import Caller
from trimtab_router.graph import Runnable
from trimtab_router.stage.policies.view import Point, View
from trimtab_router.stage.queue import DeadlineQueue
from trimtab_router.stage.work import Slice, Work
from trimtab_router.wish import Wish

TASKS = ("cars", "birds")
ROW_MS = {"few": 1.0, "some": 1.5, "all": 2.0, "more": 3.0}
ACCURACY = {"few": (0.60, 0.70), "some": (0.80, 0.85), "all": (0.90, 0.90), "more": (0.95, 0.92)}


def a_point(name, looks=(), row_ms=None):
    row = (row_ms or ROW_MS[name]) / 1000
    seconds = tuple(row * (2 + rows) for rows in range(1, 33))
    accuracy = dict(zip(TASKS, ACCURACY[name], strict=True))
    return Point(
        name, float(np.mean(ACCURACY[name])), lambda rows: row * (2 + rows), None, accuracy, seconds, tuple(looks)
    )


POINTS = tuple(a_point(name) for name in ("more", "all", "some", "few"))


def a_work(deadline, *, utility=1.0, task="cars", rows=1, at=0.0, floor=0.0):
    wish = Wish(utility=utility, task=task)
    runnable = Runnable("s", rows, {"x": np.zeros((rows, 1), np.float32)})
    return Work(Caller(), runnable, deadline=deadline, now=at, wish=wish, accuracy_floor=floor)


def a_view(works, *, points=POINTS, now=0.0, arrivals_rps=0.0, **changes):
    queue = DeadlineQueue(100_000)
    for work in works:
        queue.push(Slice(work, 0, work.rows))
    return View(now, queue, points, 32, 0.0, "Predicted", arrivals_rps=lambda: arrivals_rps, **changes)


def a_random_view(rng, rows, points):
    utilities = rng.choice([0.01, 0.2, 0.3, 1.0], rows)
    deadlines = np.sort(rng.uniform(0.05, 1.0, rows)) * rows * 0.0015
    works = [
        a_work(float(d), utility=float(u), task=str(rng.choice(TASKS)))
        for d, u in zip(deadlines, utilities, strict=True)
    ]
    return a_view(works, points=points, arrivals_rps=float(rng.uniform(0, 1000)))


def eight_points():
    names = np.array(["few", "some", "all", "more"])
    return tuple(a_point(str(names[n // 2]), row_ms=0.6 + 0.3 * n) for n in reversed(range(8)))
