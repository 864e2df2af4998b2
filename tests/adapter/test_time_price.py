"""The price of time: the slope of the best mixes where the seconds end."""

import pytest

from trimtab_adapter.planning.time_price import BUSY_SHARE, time_price
from trimtab_pipelines.mixes import best_mixes

POINTS = [(0.001, 0.6), (0.004, 0.7), (0.003, 0.75), (0.01, 0.8)]


def test_a_point_below_the_line_between_others_is_no_corner():
    assert best_mixes(POINTS) == [(0.0, 0.0), (0.001, 0.6), (0.003, 0.75), (0.01, 0.8)]


@pytest.mark.parametrize(
    ("seconds_a_row", "price"), [(0.02, 0.0), (0.005, 0.05 / 0.007), (0.002, 0.15 / 0.002), (0.0005, 600.0)]
)
def test_the_price_is_what_the_last_second_gives(seconds_a_row, price):
    assert time_price(POINTS, 2 * BUSY_SHARE / seconds_a_row, replicas=2) == pytest.approx(price)


def test_where_nobody_comes_time_costs_nothing():
    assert time_price(POINTS, 0.0, 1) == 0.0
    assert time_price([], 100.0, 1) == 0.0
