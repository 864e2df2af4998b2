"""Sharing of one queue between replica groups: rows that replicas of more accurate points serve in time are theirs.

A replica of a less accurate group takes the rows that overflow: those that the others, each with full batches in the
order of deadlines, would finish too late.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import NamedTuple

from trimtab_pipelines.plan import StagePlan
from trimtab_router.scheduling.policies.interface import (
    NEVER,
    Dispatch,
    Escalation,
    Point,
    SchedulerView,
    least_seconds,
)
from trimtab_router.scheduling.queue import MAX_SLICES
from trimtab_router.scheduling.stage_request import RowSlice


class Server(NamedTuple):
    """A replica of a more accurate group."""

    free_at: float
    seconds: float
    """Of a full batch."""
    batch_rows: int


class Overflow(NamedTuple):
    """Rows that other replicas would finish too late, and when more rows do if no replica is free until then."""

    rows: int
    until: float = NEVER


def overflow(
    waiting: Iterable[RowSlice],
    servers: Sequence[Server],
    later_seconds: float,
    serves: Callable[[RowSlice], bool],
    most_rows: int,
) -> Overflow:
    """Count the rows that overflow, up to `most_rows`; `serves`: whether the less accurate group may serve a slice."""
    starts = [(server.free_at, index) for index, server in enumerate(servers)]
    heapify(starts)
    rows, until, room = 0, NEVER, servers[starts[0][1]].batch_rows
    for row_slice in islice(waiting, MAX_SLICES):
        deadline, left = row_slice.request.due_at - later_seconds, row_slice.rows
        while left:
            start, index = starts[0]
            server = servers[index]
            spare = deadline - start - server.seconds
            if spare < 0:
                rows += left if serves(row_slice) else 0
                break
            until = min(until, server.free_at + spare)
            taken = min(left, room)
            left, room = left - taken, room - taken
            if not room:
                heappop(starts)
                heappush(starts, (start + server.seconds, index))
                room = servers[starts[0][1]].batch_rows
        if rows >= most_rows:
            return Overflow(most_rows)
    return Overflow(rows, until)


def with_accuracy(points: Sequence[Point], plan: StagePlan, accuracy: float) -> Sequence[Point]:
    """Return points of which the planned one has the accuracy after the escalation."""
    planned = plan.variant, plan.operating_point
    return [replace(point, accuracy=accuracy) if point.key == planned else point for point in points]


def with_escalation(dispatch: Dispatch, points: Sequence[Point], escalation: Escalation | None) -> Dispatch:
    """Return a dispatch at the original one of its points, with the escalation if the point has it."""
    if escalation is None:
        return dispatch
    point = next(point for point in points if point.key == dispatch.point.key)
    escalates = dispatch.escalation is None and escalation in point.escalations
    return replace(dispatch, point=point, escalation=escalation if escalates else dispatch.escalation)


def needs_second_group(view: SchedulerView, whole: SchedulerView, row_slice: RowSlice) -> bool:
    """Return whether only the points of a view, which serve second passes, may serve a slice."""
    if row_slice.provisional_response is not None:
        return True
    own = {point.key for point in view.points}
    return all(point.key in own for point in whole.points_for(row_slice))


def leaves_to_others(dispatch: Dispatch, view: SchedulerView, whole: SchedulerView) -> bool:
    """Return whether a batch would be late at this replica while a faster point of another group may be in time."""
    rows = sum(row_slice.rows for row_slice in dispatch.row_slices)
    seconds = dispatch.point.seconds(rows)
    late = any(view.slack_seconds(row_slice) < seconds for row_slice in dispatch.row_slices)
    faster = least_seconds(whole.points, 1) < least_seconds(view.points, 1)
    return late and faster and view.drop_policy != "Never"
