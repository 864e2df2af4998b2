"""Who is dropped first: the lowest priority, then the least utility a second; and nobody without need."""

import numpy as np
import pytest

from tests.router.test_batching import FULL, HALF, form_batch, terms
from tests.router.test_queue import Caller, a_queue, whole
from trimtab_router.request.graph import ReadyStage
from trimtab_router.request.request_options import RequestOptions
from trimtab_router.scheduling.policies import slack_fit
from trimtab_router.scheduling.policies.drop_order import rows_ahead_of
from trimtab_router.scheduling.policies.interface import Point
from trimtab_router.scheduling.stage_request import StageRequest

HIGH, LOW = RequestOptions(priority=1), RequestOptions(priority=5)
STRONG = Point("strong", 0.97, lambda rows: 0.020 + 0.020 * rows)


def a_wishing(wish, deadline=1.0, rows=1, *, floor=0.0):
    x = np.zeros((rows, 1), np.float32)
    return StageRequest(
        Caller(), ReadyStage("s", rows, {"x": x}), deadline=deadline, now=0.0, options=wish, accuracy_floor=floor
    )


def shed(works, **changes):
    """Who is dropped until a batch leaves, in words of who they are."""
    queue, dropped = a_queue(*works), []
    while True:
        formed = form_batch(queue, 0.0, terms(**changes))
        dropped += formed.dropped
        if formed.batch or not formed.dropped:
            return [piece.request for piece in dropped], [piece.request for piece in formed.batch]


def test_a_low_priority_that_can_be_served_in_time_is_served_in_the_order_of_deadlines():
    low, high = a_wishing(LOW, 0.3), a_wishing(HIGH, 0.4)

    assert shed([high, low]) == ([], [low, high])


def test_in_overload_the_lowest_priority_goes_first_however_urgent():
    low = [a_wishing(LOW, 0.1) for _ in range(20)]
    high = [a_wishing(HIGH, 0.2) for _ in range(16)]
    dropped, left = shed([*low, *high])

    assert set(dropped) <= set(low)
    assert len(dropped) >= 16
    assert set(left) & set(high)


def test_of_one_priority_the_least_utility_a_second_goes_first():
    """Ten rows for a utility of 5 are worth less than one row for 1."""
    bulky = [a_wishing(RequestOptions(utility=5.0), 0.15, rows=10) for _ in range(3)]
    small = [a_wishing(RequestOptions(), 0.2) for _ in range(10)]
    dropped, _ = shed([*bulky, *small])

    assert dropped
    assert set(dropped) <= set(bulky)


def test_where_all_are_worth_the_same_nobody_is_picked_out():
    works = [a_wishing(HIGH, 0.1 + 0.01 * n) for n in range(40)]
    plain = [a_wishing(RequestOptions(), 0.1 + 0.01 * n) for n in range(40)]

    assert len(shed(works)[0]) == len(shed(plain)[0])


@pytest.mark.parametrize("policy", ["Expired", "Never"])
def test_nobody_is_picked_out_where_the_pipeline_drops_nobody_by_prediction(policy):
    works = [a_wishing(LOW, 0.1) for _ in range(20)] + [a_wishing(HIGH, 0.2) for _ in range(16)]

    assert shed(works, policy=policy)[0] == []


def test_only_rows_worth_as_much_are_ahead_at_the_door():
    queue = a_queue(a_wishing(LOW, 0.1), a_wishing(HIGH, 0.2), a_wishing(HIGH, 0.9))

    assert rows_ahead_of(a_wishing(HIGH, 0.5), queue) == 1
    assert rows_ahead_of(a_wishing(LOW, 0.5), queue) == 2


def test_a_floor_is_kept_by_the_next_point_that_reaches_it_and_others_join():
    picky, plain = a_wishing(RequestOptions(accuracy_floor=0.95), 0.5, floor=0.95), a_wishing(RequestOptions(), 0.6)
    formed = form_batch(a_queue(picky, plain), 0.0, terms(points=(FULL, STRONG)))

    assert (formed.point, [piece.request for piece in formed.batch]) == ("strong", [picky, plain])


def test_a_floor_waits_for_a_batch_that_reaches_it():
    plain, picky = a_wishing(RequestOptions(), 0.5), a_wishing(RequestOptions(accuracy_floor=0.95), 0.6, floor=0.95)
    formed = form_batch(a_queue(plain, picky), 0.0, terms(points=(FULL, STRONG)))

    assert (formed.point, [piece.request for piece in formed.batch]) == ("full", [plain])


def test_slack_fit_takes_the_largest_batch_among_points_that_keep_the_floor_of_every_row():
    picky = [a_wishing(RequestOptions(accuracy_floor=0.85), 0.045, floor=0.85) for _ in range(2)]
    plain = [a_wishing(RequestOptions(), 0.3) for _ in range(6)]
    formed = form_batch(a_queue(*picky, *plain), 0.0, terms(points=(FULL, HALF)), slack_fit.decide)

    assert formed.point == "full"
    assert len(formed.batch) == 3


def test_what_no_point_serves_is_dropped_whatever_the_pipeline_drops():
    picky = a_wishing(RequestOptions(accuracy_floor=0.99), 9.0, floor=0.99)
    view = terms("Never", points=(FULL, HALF))

    assert view.drop_time(whole(picky)) == float("-inf")


def test_a_task_has_its_own_accuracy():
    point = Point("p", 0.9, lambda rows: 0.01 * rows, accuracy_by_task={"odd": 0.6})
    odd = a_wishing(RequestOptions(accuracy_floor=0.8, task="odd"), floor=0.8)
    other = a_wishing(RequestOptions(accuracy_floor=0.8, task="even"), floor=0.8)

    assert (point.reaches(odd), point.reaches(other)) == (False, True)
