"""The largest batch, and the most accurate operating point, that the slack of the most urgent slice allows. Pure.

Size goes before accuracy: a batch that shrinks for the better point makes everybody behind it wait. And a better point
is taken only where those behind can still make it at the fastest one, so that no row is dropped for another's accuracy.
When not even the fastest point gets to everybody, an urgent slice that would shrink the batch is dropped instead, as
`urgent_first` does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab_router.scheduling.policies.drop_order import first_to_drop
from trimtab_router.scheduling.policies.interface import Dispatch, Point, Policy, SchedulerView, WaitUntil, overloaded
from trimtab_router.scheduling.queue import BatchCandidates
from trimtab_router.scheduling.stage_request import RowSlice


@dataclass(frozen=True, slots=True)
class _Option:
    """A point, who could leave at it, how many rows of them at most, and how many in time for the most urgent."""

    point: Point
    company: BatchCandidates
    full: int
    fitting: int


def decide(view: SchedulerView) -> Dispatch | WaitUntil:
    """Let the next batch leave."""
    least = first_to_drop(view)
    if least:
        return WaitUntil(view.now, least)
    drops: list[RowSlice] = []
    for head in view.waiting:
        ways = [_way(view, head, point) for point in _preferred(view.points_for(head), head.work.wish.task)]
        if not ways:
            drops.append(head)
            continue
        quick = min(ways, key=lambda way: way.point.seconds(view.most_rows))
        shrunk = view.drop_policy == "Predicted" and 0 < quick.fitting < quick.full
        if shrunk and overloaded(view, quick.company, quick.point):
            drops.append(head)
            continue
        way = _best(view, head, ways, quick)
        return Dispatch(way.point, way.company.first(way.fitting or way.full), drops)
    return WaitUntil(drops=drops)


def _preferred(points: Sequence[Point], task: str) -> Sequence[Point]:
    """Points in the plan's order, or by how accurate they are on the task that the most urgent row names."""
    return sorted(points, key=lambda point: -point.accuracy_for(task)) if task else points


def _way(view: SchedulerView, head: RowSlice, point: Point) -> _Option:
    company = view.beside(head, point)
    full = min(view.most_rows, company.rows)
    return _Option(point, company, full, view.fitting_rows(point, head, full))


def _best(view: SchedulerView, head: RowSlice, ways: list[_Option], quick: _Option) -> _Option:
    """Of the ways with the most rows the first preferred one that costs nobody behind the deadline."""
    largest = max(way.fitting for way in ways)
    if not largest:
        return quick
    return next((way for way in ways if way.fitting == largest and _harmless(view, head, way, quick.point)), quick)


def _harmless(view: SchedulerView, head: RowSlice, way: _Option, fastest: Point) -> bool:
    """Whether all behind a batch can still be served in time at the fastest point, and a full batch of newcomers.

    Who comes next is taken to have as much time in this stage as the most urgent row had when it came.
    """
    if way.point is fastest or view.drop_policy == "Never":
        return True
    share = 1.0 / max(view.replicas, 1)
    taken = way.point.seconds(way.fitting) * share
    newcomers_slack = head.work.deadline - head.work.enqueued_at - view.later_seconds
    if taken + fastest.seconds(view.most_rows) > newcomers_slack:
        return False
    begin = view.now + view.later_seconds + taken
    row_seconds = fastest.seconds(view.most_rows) / view.most_rows * share
    for deadline, due in way.company.due():
        behind = due - way.fitting
        last_batch = fastest.seconds(max(1, min(int(behind), view.most_rows)))
        if behind > 0 and begin + max(behind * row_seconds, last_batch) > deadline:
            return False
    return True


POLICY = Policy(decide, falls_back=True)
