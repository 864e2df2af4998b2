"""The whole decision of a departure: what waits, its units, offers, schedule and batch, as the router makes it."""

import time
from functools import partial
from pathlib import Path

import numpy as np

from tests.router.schedules import batch_seconds
from trimtab_pipelines.documents import load_pipeline
from trimtab_router.request import RequestOptions
from trimtab_router.scheduling.policies import modality_mix, option_cache
from trimtab_router.scheduling.policies.interface import Dispatch, Escalation, Point, SchedulerView
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.stage_request import RowSlice, StageRequest

PIPELINE = Path(__file__).parents[2] / "pipelines" / "digits-av" / "pipeline.yaml"
LETTERS = {"audio": "A", "video": "V", "text": "T"}
FULL_ROWS = 64
SLO_SECONDS = 0.3
FLOORS = (0.45, 0.91)
WAITING, VIEWS = 20, 500
LEARNT_EVERY = 10
"""Decisions: how long a point takes is learnt smoothly, and moves by a step now and then."""


class _Nobody:
    """Whoever waits for a work that is only decided on."""

    trace_parent = request_id = ""
    has_listener = False
    has_client = True

    def on_chunk(self, work: object, row: int, piece: object, now: float) -> None:
        """Never called."""

    def on_rows_completed(self, work: object, start: int, outputs: object) -> None:
        """Never called."""

    def on_completed(self, work: object, outputs: object, served: object) -> None:
        """Never called."""

    def on_refused(self, refusal: object) -> None:
        """Never called."""

    def on_embeddings_lost(self, work: object, *, counts: bool) -> None:
        """Never called."""


def prepare_seconds() -> float:
    """Processor seconds of writing down, when a plan begins, what all its decisions look up."""
    begun = time.process_time()
    option_cache.precompute_tables(POINTS, FULL_ROWS)()
    return time.process_time() - begun


def milliseconds(rows: tuple[int, int], views: int = VIEWS) -> list[float]:
    """Processor milliseconds of each decision, every one among other jobs, while points become slower and faster."""
    rng = np.random.default_rng(3)
    found = []
    for place, view in enumerate([_view(rng, rows) for _ in range(views)]):
        if place % LEARNT_EVERY == 0:  # as a batch came back that took longer or less than thought
            DRIFT[POINTS[int(rng.integers(len(POINTS)))].name] = float(rng.uniform(0.9, 1.1))
        begun = time.process_time()
        decision = modality_mix.decide(view)
        found.append(1e3 * (time.process_time() - begun))
        if not isinstance(decision, Dispatch):
            raise RuntimeError("there is enough time for everybody, and yet nothing leaves")
    return found


def _view(rng: np.random.Generator, rows: tuple[int, int]) -> SchedulerView:
    queue = DeadlineQueue(1_000_000)
    for _ in range(WAITING):
        count, deadline = int(rng.integers(rows[0], rows[1] + 1)), float(rng.uniform(0.1, 1.0)) * SLO_SECONDS
        inputs = {name: np.zeros((count, 1), np.uint8) for name in LETTERS}
        floor = float(rng.uniform(*FLOORS))
        work = StageRequest(
            _Nobody(),
            "name",
            count,
            inputs,
            deadline=deadline,
            now=deadline - SLO_SECONDS,
            options=RequestOptions(accuracy_floor=floor),
            accuracy_floor=floor,
        )
        queue.push(RowSlice(work, 0, count))
    return SchedulerView(0.0, queue, POINTS, FULL_ROWS, 0.0, "Predicted", free_at=lambda: (0.0,), mixes_points=True)


def _points() -> list[Point]:
    (stage,) = load_pipeline(PIPELINE).spec.stages
    found = []
    for point in stage.variants[0].points:
        names = point.batch_inputs(stage.inputs) or frozenset(LETTERS)
        profiled = tuple(batch_seconds("".join(LETTERS[name] for name in LETTERS if name in names)))
        looks = tuple(
            Escalation(look.to, look.confidence_below, look.share, look.accuracy) for look in point.escalations
        )
        seconds = partial(_now, point.name, profiled)
        found.append(Point(point.name, point.accuracy, seconds, names, profiled=profiled, escalations=looks))
    return found


def _now(name: str, profiled: tuple[float, ...], rows: int) -> float:
    return DRIFT.get(name, 1.0) * profiled[rows - 1]


DRIFT: dict[str, float] = {}
"""What each point takes now by what was profiled."""
POINTS = _points()
