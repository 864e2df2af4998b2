"""Scheduling decisions of ModalityMix on random queues of digits-av, whose batch times drift."""

import time
from functools import partial
from pathlib import Path

import numpy as np

from tests.router.schedules import batch_seconds
from tests.router.test_queue import a_work
from trimtab_pipelines.documents import load_pipeline
from trimtab_router.scheduling.policies import modality_mix, option_cache
from trimtab_router.scheduling.policies.interface import Dispatch, Escalation, Point, SchedulerView
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.stage_request import RowSlice

PIPELINE = Path(__file__).parents[2] / "pipelines" / "digits-av" / "pipeline.yaml"
LETTERS = {"audio": "A", "video": "V", "text": "T"}
FULL_ROWS = 64
SLO_SECONDS = 0.3
FLOORS = (0.45, 0.91)
WAITING, VIEWS = 20, 500
DRIFT_EVERY = 10
"""Decisions between two changes of a measured batch time."""


def prepare_seconds() -> float:
    started = time.process_time()
    option_cache.precompute_tables(POINTS, FULL_ROWS)()
    return time.process_time() - started


def decision_milliseconds(rows: tuple[int, int], views: int = VIEWS) -> list[float]:
    """Return the processor milliseconds of each decision, each on a queue of its own, while batch times drift."""
    rng = np.random.default_rng(3)
    milliseconds = []
    for index, view in enumerate([_view(rng, rows) for _ in range(views)]):
        if index % DRIFT_EVERY == 0:  # a batch took more or less time than predicted
            DRIFT[POINTS[int(rng.integers(len(POINTS)))].name] = float(rng.uniform(0.9, 1.1))
        started = time.process_time()
        decision = modality_mix.decide(view)
        milliseconds.append(1e3 * (time.process_time() - started))
        if not isinstance(decision, Dispatch):
            raise RuntimeError("no batch is dispatched although every deadline can be met")
    return milliseconds


def _view(rng: np.random.Generator, rows: tuple[int, int]) -> SchedulerView:
    queue = DeadlineQueue(1_000_000)
    for _ in range(WAITING):
        count, deadline = int(rng.integers(rows[0], rows[1] + 1)), float(rng.uniform(0.1, 1.0)) * SLO_SECONDS
        floor = float(rng.uniform(*FLOORS))
        request = a_work(count, deadline, now=deadline - SLO_SECONDS, floor=floor, inputs=LETTERS)
        queue.push(RowSlice(request, 0, count))
    return SchedulerView(0.0, queue, POINTS, FULL_ROWS, 0.0, "Predicted", free_at=lambda: (0.0,), mixes_points=True)


def _points() -> list[Point]:
    (stage,) = load_pipeline(PIPELINE).spec.stages
    points = []
    for point in stage.variants[0].points:
        names = point.batch_inputs(stage.inputs) or frozenset(LETTERS)
        profiled = tuple(batch_seconds("".join(LETTERS[name] for name in LETTERS if name in names)))
        escalations = tuple(
            Escalation(rule.confidence_below, rule.to, rule.accuracy, rule.share) for rule in point.escalations
        )
        seconds = partial(_batch_seconds, point.name, profiled)
        points.append(Point(point.name, point.accuracy, seconds, names, profiled=profiled, escalations=escalations))
    return points


def _batch_seconds(name: str, profiled: tuple[float, ...], rows: int) -> float:
    return DRIFT.get(name, 1.0) * profiled[rows - 1]


DRIFT: dict[str, float] = {}
"""Batch time of each point as a multiple of the profiled one."""
POINTS = _points()
