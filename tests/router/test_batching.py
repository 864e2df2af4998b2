"""Batches: as full as the most urgent member can afford; who is dropped, and when."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.router.test_queue import a_queue, a_work
from trimtab_router.scheduling.policies import earliest_deadline_first, slack_fit
from trimtab_router.scheduling.policies.interface import Dispatch, Point, SchedulerView
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.stage_request import RowSlice

FULL = Point("full", 0.9, lambda rows: 0.010 + 0.010 * rows)
HALF = Point("half", 0.8, lambda rows: 0.005 + 0.002 * rows)


def terms(policy="Predicted", max_rows=8, *, later=0.0, replicas=1, points=(FULL,)):
    return SchedulerView(0.0, DeadlineQueue(0), points, max_rows, later, policy, replicas)


def drop_hopeless(queue, view):
    dropped = []
    while (head := queue.head()) is not None and view.drop_time(head) < view.now:
        dropped.append(queue.pop())
    return dropped


@dataclass
class Formed:
    batch: Sequence[RowSlice]
    dropped: Sequence[RowSlice]
    point: str


def form_batch(queue, now, given_terms, decide=earliest_deadline_first.decide):
    view = replace(given_terms, now=now, waiting=queue)
    dropped = drop_hopeless(queue, view)
    decision = decide(view)
    batch = decision.row_slices if isinstance(decision, Dispatch) else []
    queue.remove((*decision.drops, *batch))
    point = decision.point.name if isinstance(decision, Dispatch) else ""
    return Formed(batch, [*dropped, *decision.drops], point)


def formed_rows(queue, now, given_terms):
    formed = form_batch(queue, now, given_terms)
    return sum(piece.rows for piece in formed.batch), len(formed.dropped)


@pytest.mark.parametrize(
    ("deadlines", "changes", "formed"),
    [
        pytest.param([1.0] * 20, {}, (8, 0), id="all rows have slack"),
        pytest.param([1.0], {}, (1, 0), id="a single row"),
        pytest.param([0.045, *[1.0] * 7], {}, (3, 0), id="three rows fit the slack of the first"),
        pytest.param([0.045, *[1.0] * 7], {"later": 0.020}, (1, 0), id="later stages reduce the slack"),
        pytest.param([0.045, *[0.3] * 40], {}, (8, 1), id="overload drops the urgent row"),
        pytest.param([0.045, *[0.3] * 40], {"replicas": 4}, (3, 0), id="more replicas carry the backlog"),
        pytest.param([*[0.045] * 4, *[60.0] * 400], {}, (3, 0), id="patient rows are no overload"),
        *(([*[0.05] * 8, *[0.4] * 60, *[86_400.0] * patient], {}, (8, 8)) for patient in (0, 1, 5, 20)),
        pytest.param([-5.0] * 20, {"policy": "Never"}, (8, 0), id="late rows are served"),
    ],
)
def test_most_urgent_row_limits_the_batch(deadlines, changes, formed):
    queue = a_queue(*(a_work(deadline=deadline) for deadline in deadlines))

    assert formed_rows(queue, 0.0, terms(**changes)) == formed


def test_drop_times():
    piece = a_queue(a_work(deadline=1.0)).pop()

    assert terms("Never").drop_time(piece) == float("inf")
    assert terms("Expired").drop_time(piece) == 1.0
    assert terms("Predicted", later=0.1).drop_time(piece) == pytest.approx(0.88)
    assert terms("Predicted", later=0.1, points=(FULL, HALF)).drop_time(piece) == pytest.approx(0.893)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.floats(0, 1)), max_size=40),
    st.floats(0, 1),
    st.sampled_from(["Predicted", "Expired", "Never"]),
    st.integers(1, 16),
    st.integers(1, 4),
)
def test_batches_lose_and_duplicate_no_rows_and_keep_limits(works, now, policy, max_rows, replicas):
    queue = a_queue(*(a_work(rows, deadline) for rows, deadline in works))
    before = queue.rows
    given_terms = terms(policy, max_rows, replicas=replicas)
    formed = form_batch(queue, now, given_terms)
    batch = sum(piece.rows for piece in formed.batch)

    assert batch + sum(piece.rows for piece in formed.dropped) + queue.rows == before
    assert batch <= max_rows
    assert bool(formed.batch) or queue.rows == 0
    if policy == "Never":
        assert not formed.dropped
    if policy == "Expired":
        assert all(piece.request.deadline < now for piece in formed.dropped)
    if policy == "Predicted" and formed.batch:
        head = formed.batch[0]
        assert now + FULL.seconds(min(head.rows, max_rows)) <= head.request.deadline + 1e-9
        assert all(piece.request.deadline <= head.request.deadline for piece in formed.dropped)


@given(st.lists(st.floats(0, 1), max_size=20), st.floats(0, 1))
def test_only_unreachable_rows_are_dropped(deadlines, now):
    queue = a_queue(*(a_work(deadline=deadline) for deadline in deadlines))
    dropped = drop_hopeless(queue, replace(terms(), now=now))

    assert all(piece.request.deadline - 0.020 < now for piece in dropped)
    assert queue.rows == sum(deadline - 0.020 >= now for deadline in deadlines)


BOTH = (FULL, HALF)


def fitted(queue, now=0.0, **changes):
    formed = form_batch(queue, now, terms(**{"points": BOTH} | changes), slack_fit.decide)
    return formed.point, sum(piece.rows for piece in formed.batch), len(formed.dropped)


@pytest.mark.parametrize(
    ("deadlines", "now", "changes", "result"),
    [
        pytest.param([1.0] * 8, 0.0, {}, ("full", 8, 0), id="the better point fits"),
        pytest.param([0.045, *[1.0] * 7], 0.0, {}, ("half", 8, 0), id="the better point fits three rows"),
        pytest.param([0.095] * 8 + [0.1] * 8, 0.0, {}, ("half", 8, 0), id="it would delay later rows"),
        pytest.param([0.095] * 8 + [0.1] * 8, 0.021, {}, ("half", 8, 0), id="a little later"),
        pytest.param([1.0] * 9, 1.0, {"policy": "Expired"}, ("half", 8, 0), id="late rows"),
        pytest.param([1.0] * 9, 2.0, {"policy": "Never"}, ("full", 8, 0), id="late rows that are never dropped"),
    ],
)
def test_best_point_of_the_largest_batch_runs(deadlines, now, changes, result):
    assert fitted(a_queue(*(a_work(deadline=deadline) for deadline in deadlines)), now, **changes) == result


def test_row_reachable_only_by_faster_point_is_kept():
    hopeless_at_full = a_work(deadline=0.015)

    assert fitted(a_queue(hopeless_at_full)) == ("half", 1, 0)
    assert formed_rows(a_queue(hopeless_at_full), 0.0, terms(points=BOTH)) == (1, 0)


def test_two_replicas_have_time_for_the_better_point():
    works = [a_work(deadline=0.095 + 0.03 * (n > 7)) for n in range(24)]

    assert fitted(a_queue(*works)) == ("half", 8, 0)
    assert fitted(a_queue(*works), replicas=4) == ("full", 8, 0)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.floats(0, 1)), max_size=40),
    st.floats(0, 1),
    st.integers(1, 16),
    st.integers(1, 4),
)
def test_fitted_batch_is_in_time_for_all_its_rows(works, now, max_rows, replicas):
    queue = a_queue(*(a_work(rows, deadline) for rows, deadline in works))
    before = queue.rows
    formed = form_batch(queue, now, terms(max_rows=max_rows, replicas=replicas, points=BOTH), slack_fit.decide)
    rows = sum(piece.rows for piece in formed.batch)

    assert rows + sum(piece.rows for piece in formed.dropped) + queue.rows == before
    assert bool(formed.batch) or queue.rows == 0
    if formed.batch:
        seconds = next(point for point in BOTH if point.name == formed.point).seconds(rows)
        assert all(now + seconds <= piece.request.deadline + 1e-9 for piece in formed.batch)
