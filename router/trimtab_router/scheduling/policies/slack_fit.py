"""`SlackFit`: the largest batch, then the most accurate operating point, that fits the slack of the most urgent row.

A batch that shrinks for a better point delays all rows behind it. A better point is chosen only if all of them still
meet their deadlines at the fastest point. Overload is handled as by `EarliestDeadlineFirst`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab_router.scheduling.policies.interface import (
    Dispatch,
    Point,
    Policy,
    SchedulerView,
    WaitUntil,
    first_to_drop,
    overloaded,
)
from trimtab_router.scheduling.queue import BatchCandidates
from trimtab_router.scheduling.stage_request import RowSlice


@dataclass(frozen=True, slots=True)
class _Option:
    """A point, its batch candidates, the rows of a full batch, and those that fit the slack."""

    point: Point
    candidates: BatchCandidates
    full: int
    fitting: int


def decide(view: SchedulerView) -> Dispatch | WaitUntil:
    drops_first = first_to_drop(view)
    if drops_first:
        return WaitUntil(view.now, drops_first)
    drops: list[RowSlice] = []
    for head in view.waiting:
        options = [_option(view, head, point) for point in _preferred(view.points_for(head), head.request.options.task)]
        if not options:
            drops.append(head)
            continue
        fastest = min(options, key=lambda option: option.point.seconds(view.max_batch_rows))
        shrunk = view.drop_policy == "Predicted" and 0 < fastest.fitting < fastest.full
        if shrunk and overloaded(view, fastest.candidates, fastest.point):
            drops.append(head)
            continue
        option = _best(view, head, options, fastest)
        return Dispatch(option.point, option.candidates.first(option.fitting or option.full), drops)
    return WaitUntil(drops=drops)


def _preferred(points: Sequence[Point], task: str) -> Sequence[Point]:
    return sorted(points, key=lambda point: -point.accuracy_for(task)) if task else points


def _option(view: SchedulerView, head: RowSlice, point: Point) -> _Option:
    candidates = view.candidates(head, point)
    full = min(view.max_batch_rows, candidates.rows)
    fitting = view.fitting_rows(point, head, full)
    if view.drop_policy == "Never" and point.seconds(full) > view.slack_seconds(head):
        fitting = 0  # a smaller batch would delay rows that are served anyway
    return _Option(point, candidates, full, fitting)


def _best(view: SchedulerView, head: RowSlice, options: list[_Option], fastest: _Option) -> _Option:
    """Return the preferred option among those with the most fitting rows that delays no later row past its deadline."""
    largest = max(option.fitting for option in options)
    if not largest:
        return fastest
    return next(
        (
            option
            for option in options
            if option.fitting == largest and _delays_no_row(view, head, option, fastest.point)
        ),
        fastest,
    )


def _delays_no_row(view: SchedulerView, head: RowSlice, option: _Option, fastest: Point) -> bool:
    """Return whether all rows behind a batch, and a full batch of new rows, can be served in time at the fastest point.

    New rows are taken to have as much time in this stage as the most urgent row had on arrival.
    """
    if option.point is fastest:
        return True
    share = 1.0 / max(view.ready_replicas, 1)
    taken = option.point.seconds(option.fitting) * share
    if taken + fastest.seconds(view.max_batch_rows) > view.given_seconds(head):
        return False
    begin = view.now + view.later_seconds + taken
    row_seconds = fastest.seconds(view.max_batch_rows) / view.max_batch_rows * share
    for deadline, due in option.candidates.due():
        behind = due - option.fitting
        last_batch = fastest.seconds(max(1, min(int(behind), view.max_batch_rows)))
        if behind > 0 and begin + max(behind * row_seconds, last_batch) > deadline:
            return False
    return True


POLICY = Policy(decide, uses_fallbacks=True)
