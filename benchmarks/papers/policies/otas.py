"""OTAS as printed (Algorithms 1 to 3), with the known defects of the paper.

A baseline. Algorithm 1 batches queries in order of arrival: into the newest open batch whose first query arrived no
longer than δ ago, that has room, and whose deadline and first utility are near. Batches are ordered by deadline. If
there are few, Algorithm 3 gives them the point of a table by arrival rate. More are planned by a dynamic program
(Algorithm 2), which has one clock for each batch and point, that of the most valuable plan however late it ends; takes
a batch to last as long as its rows one by one in full batches; and traces what it could not place to the first point of
its list.

Left out: the first two seconds of a service, in which the paper always uses the table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from trimtab_router.scheduling.policies import slack_fit
from trimtab_router.scheduling.policies.interface import Dispatch, Point, Policy, SchedulerView, WaitUntil
from trimtab_router.scheduling.policies.queue_plan import first_rows
from trimtab_router.scheduling.queue import MAX_SLICES
from trimtab_router.scheduling.stage_request import RowSlice

DELTA_SECONDS, ETA_SECONDS, MU, KAPPA, BETA = 0.5, 0.5, 0.8, 0.8, 5
"""As the paper sets them (section V)."""
HEADROOM = 379 / 580
"""Share of a point's capacity up to which table I of the paper uses it, for the plain model."""
Table = Callable[[SchedulerView, Sequence[Point]], Point]


@dataclass(slots=True, eq=False)
class Batch:
    """Queries that the paper would run as one batch; `utility` is that of the first."""

    first_at: float
    utility: float
    deadline: float
    slices: list[RowSlice] = field(default_factory=list)
    rows: int = 0

    def add(self, row_slice: RowSlice, deadline: float) -> None:
        self.slices.append(row_slice)
        self.rows += row_slice.rows
        self.deadline = min(self.deadline, deadline)

    def value(self, point: Point) -> float:
        """Return utility times accuracy of all rows."""
        return sum(p.rows * p.request.options.utility * point.accuracy_for(p.request.options.task) for p in self.slices)

    @property
    def mean_utility(self) -> float:
        return sum(row_slice.rows * row_slice.request.options.utility for row_slice in self.slices) / max(self.rows, 1)


def decide(view: SchedulerView, *, table: Table | None = None) -> Dispatch | WaitUntil:
    """Dispatch the first batch that is not given up.

    `view`: the queue. `table`: the paper's f, from arrival rate to point; None for one derived from the profile.
    """
    start = max(view.now, min(view.free_at(), default=view.now))
    points = sorted(view.points, key=lambda point: point.seconds(view.max_batch_rows))
    batches = batched(view)
    if not batches:
        return WaitUntil()
    if len(batches) <= BETA:
        chosen = _by_rate(view, points, (table or fastest_enough)(view, points), batches, start)
    else:
        chosen = by_printed_program(view, points, batches, start)
    for batch, point in zip(batches, chosen, strict=True):
        if point is not None and any(point.suits(row_slice) for row_slice in batch.slices):
            return Dispatch(point, first_rows(batch.slices, view.max_batch_rows))
    return WaitUntil() if view.drop_policy == "Predicted" else slack_fit.decide(view)


def batched(view: SchedulerView) -> list[Batch]:
    """Return the batches of Algorithm 1 by deadline."""
    batches: list[Batch] = []
    for row_slice in sorted(islice(view.waiting, MAX_SLICES), key=lambda row_slice: row_slice.request.enqueued_at):
        deadline = row_slice.request.due_at - view.later_seconds
        batch = _open_batch(batches, row_slice, deadline, view.max_batch_rows)
        if batch is None:
            batch = Batch(row_slice.request.enqueued_at, row_slice.request.options.utility, deadline)
            batches.append(batch)
        batch.add(row_slice, deadline)
    return sorted(batches, key=lambda batch: batch.deadline)


def _open_batch(batches: Sequence[Batch], row_slice: RowSlice, deadline: float, most_rows: int) -> Batch | None:
    work = row_slice.request
    if row_slice.alone:
        return None
    for batch in reversed(batches):
        if batch.first_at + DELTA_SECONDS < work.enqueued_at:
            return None
        near = abs(batch.deadline - deadline) <= ETA_SECONDS and abs(batch.utility - work.options.utility) <= MU
        first = batch.slices[0]
        alike = first.request.signature == work.signature and not first.alone
        if near and alike and batch.rows + row_slice.rows <= most_rows:
            return batch
    return None


def fastest_enough(view: SchedulerView, points: Sequence[Point]) -> Point:
    """Return the most accurate point that carries the arrival rate with the paper's headroom, else the fastest."""
    load_rps = view.arrivals_rps()
    carrying = [p for p in points if HEADROOM * max(view.ready_replicas, 1) >= load_rps * _row_seconds(view, p)]
    return max(carrying, key=lambda point: point.accuracy) if carrying else points[0]


def _row_seconds(view: SchedulerView, point: Point) -> float:
    """Return the seconds of a row in a full batch: the paper's latency of a sample."""
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
    """Algorithm 2; None for a batch that is not executed."""
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


def _next_row(
    view: SchedulerView,
    points: Sequence[Point],
    batch: Batch,
    worth: Sequence[float],
    clocks: Sequence[float],
    start: float,
) -> tuple[list[float], list[float], list[int]]:
    """Return a row of dp, C and S; initial values stay if nothing is better, as printed."""
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


POLICY = Policy(decide, uses_fallbacks=True)
