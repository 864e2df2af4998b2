"""Shadow price of time: slope of the best mixes at the end of the budget."""

import pytest

from trimtab_pipelines.plan import StagePlan
from trimtab_pipelines.shadow_price import (
    BUSY_SHARE,
    best_mixes,
    observed_shadow_price,
    shadow_price,
    with_shadow_price,
)

POINTS = [(0.001, 0.6), (0.004, 0.7), (0.003, 0.75), (0.01, 0.8)]


def test_point_below_the_hull_is_no_corner():
    assert best_mixes(POINTS) == [(0.0, 0.0), (0.001, 0.6), (0.003, 0.75), (0.01, 0.8)]


@pytest.mark.parametrize(
    ("seconds_a_row", "price"), [(0.02, 0.0), (0.005, 0.05 / 0.007), (0.002, 0.15 / 0.002), (0.0005, 600.0)]
)
def test_price_is_the_gain_of_the_last_second(seconds_a_row, price):
    assert shadow_price(POINTS, 2 * BUSY_SHARE / seconds_a_row, replicas=2) == pytest.approx(price)


def test_price_is_zero_without_load():
    assert shadow_price(POINTS, 0.0, 1) == 0.0
    assert shadow_price([], 100.0, 1) == 0.0


def a_stage_plan(**changes):
    best, fast = ({"accuracy": accuracy, "serviceSeconds": {"8": 8 * seconds}} for seconds, accuracy in POINTS[::-3])
    points = {"operatingPoint": "best", "fallbacks": [{"name": "fast"} | fast]} | best
    return StagePlan.model_validate({"name": "a", "variant": "b", "batchSize": 8, "replicas": 2} | points | changes)


def test_observed_price_equals_price_of_slower_profile():
    slower = [(3.0 * seconds, accuracy) for seconds, accuracy in POINTS[::-3]]
    for rows_rps in (100.0, 300.0, 800.0):
        plan = with_shadow_price(a_stage_plan(), rows_rps)

        assert observed_shadow_price(plan, 1.0) == plan.shadow_price == shadow_price(POINTS[::-3], rows_rps, 2)
        assert observed_shadow_price(plan, 3.0) == pytest.approx(shadow_price(slower, rows_rps, 2))


def test_price_without_rate_is_unchanged():
    assert observed_shadow_price(a_stage_plan(shadowPrice=7.0), 3.0) == 7.0
