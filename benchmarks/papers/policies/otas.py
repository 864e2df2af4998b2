"""OTAS as printed (Algorithms 1 to 3), with what is known to be wrong with it. Pure.

A baseline. Who waits is batched by the order of arrival (1): into the newest open batch whose first came no longer than
δ ago, that has room, and whose deadline and first utility are near. Batches stand by their deadlines. Few of them get
the point that a table gives for the rate of arrivals (3); more are planned by a dynamic program (2) that keeps one
clock for each batch and point, that of the most valuable plan however late it ends, takes a batch to last as long as
its rows one by one in full batches, and traces what it could not place to the first point of its list.

Left out: the first two seconds of a service, in which the paper uses the table whatever waits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf

import numpy as np

from trimtab_router.scheduling.policies import slack_fit
from trimtab_router.scheduling.policies.deadline_schedule import DROPPED, Job, solve
from trimtab_router.scheduling.policies.interface import Dispatch, Point, Policy, SchedulerView, WaitUntil
from trimtab_router.scheduling.policies.job_groups import first_rows
from trimtab_router.scheduling.queue import MAX_SLICES
from trimtab_router.scheduling.stage_request import RowSlice

DELTA_SECONDS, ETA_SECONDS, MU, KAPPA, BETA = 0.5, 0.5, 0.8, 0.8, 5
"""As the paper sets them (section V)."""
HEADROOM = 379 / 580
"""Of what a point carries, up to which rate the paper's table I gives it: what it does for the plain model."""
Table = Callable[[SchedulerView, Sequence[Point]], Point]
Offer = tuple[float, float, Point]


@dataclass(slots=True, eq=False)
class Batch:
    """Queries the paper would run as one; `utility` is the first one's, times in seconds."""

    first_at: float
    utility: float
    deadline: float
    slices: list[RowSlice] = field(default_factory=list)
    rows: int = 0

    def add(self, piece: RowSlice, deadline: float) -> None:
        """One more."""
        self.slices.append(piece)
        self.rows += piece.rows
        self.deadline = min(self.deadline, deadline)

    def value(self, point: Point) -> float:
        """Utility times accuracy of all its rows."""
        return sum(p.rows * p.request.options.utility * point.accuracy_for(p.request.options.task) for p in self.slices)

    @property
    def mean_utility(self) -> float:
        """Of its rows."""
        return sum(piece.rows * piece.request.options.utility for piece in self.slices) / max(self.rows, 1)


def decide(
    view: SchedulerView, *, table: Table | None = None, program: "Program | None" = None
) -> Dispatch | WaitUntil:
    """Let the first batch leave that is not given up.

    Args:
        view: what waits.
        table: the paper's f, from the rate of arrivals to a point; None for one that follows from the profile.
        program: instead of Algorithm 2.
    """
    start = max(view.now, min(view.free_at(), default=view.now))
    points = sorted(view.points, key=lambda point: point.seconds(view.max_batch_rows))
    batches = batched(view)
    if not batches:
        return WaitUntil()
    if len(batches) <= BETA:
        chosen = _by_rate(view, points, (table or fastest_enough)(view, points), batches, start)
    else:
        chosen = (program or by_printed_program)(view, points, batches, start)
    for batch, point in zip(batches, chosen, strict=True):
        if point is not None and any(point.suits(piece) for piece in batch.slices):
            return Dispatch(point, first_rows(batch.slices, view.max_batch_rows))
    return WaitUntil() if view.drop_policy == "Predicted" else slack_fit.decide(view)


def batched(view: SchedulerView) -> list[Batch]:
    """Algorithm 1 over all that waits, and the batches by their deadlines."""
    batches: list[Batch] = []
    for piece in sorted(islice(view.waiting, MAX_SLICES), key=lambda piece: piece.request.enqueued_at):
        deadline = piece.request.due_at - view.later_seconds
        batch = _open_batch(batches, piece, deadline, view.max_batch_rows)
        if batch is None:
            batch = Batch(piece.request.enqueued_at, piece.request.options.utility, deadline)
            batches.append(batch)
        batch.add(piece, deadline)
    return sorted(batches, key=lambda batch: batch.deadline)


def _open_batch(batches: Sequence[Batch], piece: RowSlice, deadline: float, most_rows: int) -> Batch | None:
    work = piece.request
    if piece.alone:
        return None
    for batch in reversed(batches):
        if batch.first_at + DELTA_SECONDS < work.enqueued_at:
            return None
        near = abs(batch.deadline - deadline) <= ETA_SECONDS and abs(batch.utility - work.options.utility) <= MU
        first = batch.slices[0]
        alike = first.request.signature == work.signature and not first.alone
        if near and alike and batch.rows + piece.rows <= most_rows:
            return batch
    return None


def fastest_enough(view: SchedulerView, points: Sequence[Point]) -> Point:
    """The most accurate point that carries the rate with the paper's head-room, else the fastest."""
    load_rps = view.arrivals_rps()
    carrying = [p for p in points if HEADROOM * max(view.ready_replicas, 1) >= load_rps * _row_seconds(view, p)]
    return max(carrying, key=lambda point: point.accuracy) if carrying else points[0]


def _row_seconds(view: SchedulerView, point: Point) -> float:
    """Of a row in a full batch: the paper's latency of a sample."""
    return point.seconds(view.max_batch_rows) / view.max_batch_rows


def _by_rate(
    view: SchedulerView, points: Sequence[Point], by_rate: Point, batches: Sequence[Batch], start: float
) -> list[Point | None]:
    """Algorithm 3."""
    clock, found = start, list[Point | None]()
    best = max(points, key=lambda point: point.accuracy)
    for batch in batches:
        if clock + batch.rows * _row_seconds(view, by_rate) >= batch.deadline:
            point = points[0]
        else:
            point = best if batch.mean_utility > KAPPA else by_rate
        clock += batch.rows * _row_seconds(view, point)
        found.append(point)
    return found


def by_printed_program(
    view: SchedulerView, points: Sequence[Point], batches: Sequence[Batch], start: float
) -> list[Point | None]:
    """Algorithm 2; None where a batch is not executed."""
    size = len(points) + 1
    worth, clocks = [0.0] * size, [start] * size
    came_from: list[list[int]] = []
    for batch in batches:
        worth, clocks, sources = _next_row(view, points, batch, worth, clocks, start)
        came_from.append(sources)
    last = max(range(size), key=worth.__getitem__)
    found: list[Point | None] = []
    for sources in reversed(came_from):
        found.append(points[last - 1] if last else None)
        last = sources[last]
    return found[::-1]


def by_exact_program(
    _: SchedulerView, points: Sequence[Point], batches: Sequence[Batch], start: float
) -> list[Point | None]:
    """What Algorithm 2 is meant to find: the best choice for every batch, by what batches of these sizes take."""
    offers = [[(point.seconds(batch.rows), batch.value(point), point) for point in points] for batch in batches]
    kept = [[offer for place, offer in enumerate(each) if _unbeaten(offer, each[:place])] for each in offers]
    jobs = [
        Job(batch.deadline, np.array([o[0] for o in each]), np.array([o[1] for o in each]))
        for batch, each in zip(batches, kept, strict=True)
    ]
    steps = solve(jobs, start).steps
    return [None if step.option == DROPPED else kept[step.first_job][step.option][2] for step in steps]


def _unbeaten(offer: Offer, faster: Sequence[Offer]) -> bool:
    return all(offer[1] > other[1] for other in faster)


def _next_row(
    view: SchedulerView,
    points: Sequence[Point],
    batch: Batch,
    worth: Sequence[float],
    clocks: Sequence[float],
    start: float,
) -> tuple[list[float], list[float], list[int]]:
    """A row of dp, C and S: what they begin with stays wherever nothing is better, as printed."""
    size = len(worth)
    row, clock, source = [0.0] * size, [start] * size, [1] * size
    for before in range(size):
        if worth[before] > row[0]:
            row[0], source[0], clock[0] = worth[before], before, clocks[before]
    for option, point in enumerate(points, 1):
        seconds, value, placed = batch.rows * _row_seconds(view, point), batch.value(point), False
        for before in range(size):
            if worth[before] == -inf or clocks[before] + seconds >= batch.deadline:
                continue
            placed = True
            if worth[before] + value > row[option]:
                row[option], source[option] = worth[before] + value, before
                clock[option] = clocks[before] + seconds
        if not placed:
            row[option], clock[option] = -inf, inf
    return row, clock, source


Program = Callable[[SchedulerView, Sequence[Point], Sequence[Batch], float], list[Point | None]]
POLICY = Policy(decide, uses_fallbacks=True)
