"""Batches: as full as the most urgent member can afford; who is dropped, when, and in which order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.router.test_queue import a_queue, a_work, whole
from trimtab_router.scheduling.policies import earliest_deadline_first, slack_fit
from trimtab_router.scheduling.policies.interface import Dispatch, Point, SchedulerView, rows_ahead_of
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.stage_request import RowSlice

FULL = Point("full", 0.9, lambda rows: 0.010 + 0.010 * rows)
HALF = Point("half", 0.8, lambda rows: 0.005 + 0.002 * rows)


def terms(policy="Predicted", max_rows=8, *, later=0.0, replicas=1, points=(FULL,)):
    return SchedulerView(0.0, DeadlineQueue(0), points, max_rows, later, policy, replicas)


@dataclass
class Formed:
    batch: Sequence[RowSlice]
    dropped: Sequence[RowSlice]
    point: str


def form_batch(queue, now, given_terms, decide=earliest_deadline_first.decide):
    view = replace(given_terms, now=now, waiting=queue)
    dropped = []
    while (head := queue.head()) is not None and view.drop_time(head) < view.now:
        dropped.append(queue.pop())
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
        pytest.param([1.0] * 9, 2.0, {"policy": "Never"}, ("half", 8, 0), id="late rows that are never dropped"),
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


HIGH, LOW = {"priority": 1}, {"priority": 5}
STRONG = Point("strong", 0.97, lambda rows: 0.020 + 0.020 * rows)


def shed(works, **changes):
    queue, dropped = a_queue(*works), []
    while True:
        formed = form_batch(queue, 0.0, terms(**changes))
        dropped += formed.dropped
        if formed.batch or not formed.dropped:
            return [piece.request for piece in dropped], [piece.request for piece in formed.batch]


def test_low_priority_in_time_is_served_by_deadline():
    low, high = a_work(deadline=0.3, **LOW), a_work(deadline=0.4, **HIGH)

    assert shed([high, low]) == ([], [low, high])


def test_overload_drops_lowest_priority_first():
    low = [a_work(deadline=0.1, **LOW) for _ in range(20)]
    high = [a_work(deadline=0.2, **HIGH) for _ in range(16)]
    dropped, left = shed([*low, *high])

    assert set(dropped) <= set(low)
    assert len(dropped) >= 16
    assert set(left) & set(high)


def test_overload_drops_least_utility_per_second_first():
    bulky = [a_work(10, 0.15, utility=5.0) for _ in range(3)]
    small = [a_work(deadline=0.2) for _ in range(10)]
    dropped, _ = shed([*bulky, *small])

    assert dropped
    assert set(dropped) <= set(bulky)


def test_equal_ranks_drop_none():
    works = [a_work(deadline=0.1 + 0.01 * n, **HIGH) for n in range(40)]
    plain = [a_work(deadline=0.1 + 0.01 * n) for n in range(40)]

    assert len(shed(works)[0]) == len(shed(plain)[0])


@pytest.mark.parametrize("policy", ["Expired", "Never"])
def test_nothing_is_dropped_without_predicted_policy(policy):
    works = [a_work(deadline=0.1, **LOW) for _ in range(20)] + [a_work(deadline=0.2, **HIGH) for _ in range(16)]

    assert shed(works, policy=policy)[0] == []


def test_admission_counts_only_rows_of_equal_rank_or_higher():
    queue = a_queue(a_work(deadline=0.1, **LOW), a_work(deadline=0.2, **HIGH), a_work(deadline=0.9, **HIGH))

    assert rows_ahead_of(a_work(deadline=0.5, **HIGH), queue) == 1
    assert rows_ahead_of(a_work(deadline=0.5, **LOW), queue) == 2


def test_floor_uses_next_reaching_point_and_others_join():
    picky, plain = a_work(deadline=0.5, floor=0.95), a_work(deadline=0.6)
    formed = form_batch(a_queue(picky, plain), 0.0, terms(points=(FULL, STRONG)))

    assert (formed.point, [piece.request for piece in formed.batch]) == ("strong", [picky, plain])


def test_floor_waits_for_a_batch_that_reaches_it():
    plain, picky = a_work(deadline=0.5), a_work(deadline=0.6, floor=0.95)
    formed = form_batch(a_queue(plain, picky), 0.0, terms(points=(FULL, STRONG)))

    assert (formed.point, [piece.request for piece in formed.batch]) == ("full", [plain])


def test_slack_fit_takes_largest_batch_above_all_floors():
    picky = [a_work(deadline=0.045, floor=0.85) for _ in range(2)]
    plain = [a_work(deadline=0.3) for _ in range(6)]
    formed = form_batch(a_queue(*picky, *plain), 0.0, terms(points=(FULL, HALF)), slack_fit.decide)

    assert formed.point == "full"
    assert len(formed.batch) == 3


def test_row_without_suitable_point_is_always_dropped():
    picky = a_work(deadline=9.0, floor=0.99)
    view = terms("Never", points=(FULL, HALF))

    assert view.drop_time(whole(picky)) == float("-inf")


def test_task_has_its_own_accuracy():
    point = Point("p", 0.9, lambda rows: 0.01 * rows, accuracy_by_task={"odd": 0.6})
    odd = a_work(floor=0.8, task="odd")
    other = a_work(floor=0.8, task="even")

    assert (point.reaches(odd), point.reaches(other)) == (False, True)
