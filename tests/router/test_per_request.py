"""Mean rows per request, and how fast it follows a change."""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from trimtab_router.observability.arrivals import PerRequestMean


def test_what_requests_bring_on_average():
    rows = PerRequestMean()
    assert rows.expected(0.0) == {}

    rows.record(1.0, {"locate": 1, "read": 3})
    rows.record(2.0, {"locate": 1})
    assert rows.expected(3.0) == {"locate": 1.0, "read": 1.5}
    rows.record(3.5, {"locate": 4})
    assert rows.expected(3.6) == {"locate": 2.0, "read": 1.0}
    assert rows.expected(61.9) == {"locate": 2.0, "read": 1.0}
    assert rows.expected(100.0) == {}


def brought(rates: Mapping[tuple[int, int], Sequence[int]], per_second: int = 20) -> PerRequestMean:
    rows = PerRequestMean()
    for (begin, end), amounts in rates.items():
        for number in range((end - begin) * per_second):
            rows.record(begin + number / per_second, {"encode": amounts[number % len(amounts)]})
    return rows


def test_rise_is_followed_in_5_seconds_and_fall_in_20():
    rows = brought({(0, 60): [0, 0, 1], (60, 66): [3], (66, 100): [0, 0, 1]})
    before, after = (brought({(0, 60): [0, 0, 1], (60, end): [3]}) for end in (66, 80))

    assert before.expected(66.0) == {"encode": pytest.approx(3.0, rel=0.15)}
    assert after.expected(80.0) == {"encode": pytest.approx(3.0, rel=0.15)}
    assert 1 / 3 < rows.expected(100.0)["encode"] < 0.5
    assert brought({(0, 60): [3], (60, 81): [0]}).expected(81.0)["encode"] < 0.25


def test_short_rise_is_followed_to_its_lower_bound():
    rows = brought({(0, 60): [0, 0, 1], (60, 62): [3]})
    minute = (58 / 3 + 6) / 60

    assert minute < rows.expected(62.0)["encode"] < (3 / 3 + 6) / 5


@pytest.mark.parametrize("per_second", [1, 3])
def test_a_few_requests_are_no_rise(per_second):
    rows = brought({(0, 60): [1], (60, 65): [3]}, per_second)
    assert rows.expected(65.0) == {"encode": pytest.approx((55 + 5 * 3) / 60)}


@pytest.mark.parametrize("per_second", [1, 2, 20])
@pytest.mark.parametrize("rare", [0.002, 0.02])
def test_wide_spread_is_not_taken_for_a_change(per_second, rare):
    shares = np.array([0.7, 0.3 - rare, rare])
    random, rows, strays = np.random.default_rng(7), PerRequestMean(), 0
    minute: deque[float] = deque(maxlen=60)
    for second in range(3600):
        drawn = random.choice([0.0, 1.0, 16.0], size=per_second, p=shares)
        for amount in drawn:
            rows.record(float(second), {"encode": amount})
        minute.append(drawn.mean())
        strays += rows.expected(second + 1.0)["encode"] != pytest.approx(np.mean(minute), rel=0.15)

    assert strays < 0.01 * 3600
