"""Drop order: the lowest priority first, then the least utility per second, and no row without need."""

import pytest

from tests.router.test_batching import FULL, HALF, form_batch, terms
from tests.router.test_queue import a_queue, a_work, whole
from trimtab_router.scheduling.policies import slack_fit
from trimtab_router.scheduling.policies.interface import Point, rows_ahead_of

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
