"""Row splits equal brute force; accuracy floors hold with their probability; shadow prices are slopes of best mixes."""

import itertools
import tracemalloc
from math import ceil, inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as draw

from trimtab_pipelines.accuracy_floor import binomial_tail, required_mean
from trimtab_pipelines.plan import StagePlan
from trimtab_pipelines.row_splits import UNIT, SplitOption, cheapest_batches, pareto_fronts
from trimtab_pipelines.shadow_price import (
    BUSY_SHARE,
    best_mixes,
    observed_shadow_price,
    shadow_price,
    with_shadow_price,
)

MILLISECONDS = draw.integers(1, 40)
POINTS = draw.lists(
    draw.tuples(draw.integers(1000, 9999), draw.lists(MILLISECONDS, min_size=1, max_size=4)), min_size=1, max_size=3
)


def brute_force_batches(single, rows):
    if not rows:
        return 0.0
    return min(
        single[size - 1] + brute_force_batches(single, rows - size) for size in range(1, min(rows, len(single)) + 1)
    )


def brute_force(points, rows, floor):
    best = inf
    for counts in itertools.product(range(rows + 1), repeat=len(points)):
        correct = sum(count * units for count, (units, _) in zip(counts, points, strict=True))
        if sum(counts) == rows and correct >= floor * rows:
            seconds = (brute_force_batches(single, n) for n, (_, single) in zip(counts, points, strict=True))
            best = min(best, sum(seconds))
    return best


@settings(max_examples=60, deadline=None)
@given(POINTS, draw.integers(1, 6), draw.integers(0, 10_000))
def test_cheapest_split_for_a_floor_equals_brute_force(points, rows, floor):
    options = [
        SplitOption(f"p{n}", units / 1e4, cheapest_batches(single, rows).seconds)
        for n, (units, single) in enumerate(points)
    ]
    front = pareto_fronts(options, rows)[rows]
    index = int(front.accuracy.searchsorted(floor / 1e4 - UNIT / (2 * rows)))
    expected = brute_force(points, rows, floor)

    if expected == inf:
        assert index == len(front.accuracy)
    else:
        assert front.seconds[index] == pytest.approx(expected)
        assert front.rows[index].sum() == rows


def test_front_rises_in_accuracy_and_seconds():
    points = (("a", 0.52, [3, 4, 5, 7]), ("at", 0.78, [4, 6, 8, 11]), ("avt", 0.8, [9, 18, 26, 35]))
    options = [SplitOption(name, accuracy, cheapest_batches(single, 16).seconds) for name, accuracy, single in points]
    for rows, front in enumerate(pareto_fronts(options, 16)):
        assert (np.diff(front.accuracy) > 0).all()
        assert (np.diff(front.seconds) > 0).all()
        assert (front.rows.sum(axis=1) == rows).all()
        seconds = [sum(option.seconds[n] for option, n in zip(options, split, strict=True)) for split in front.rows]
        np.testing.assert_allclose(front.seconds, seconds)


def test_cheapest_batches_cost_the_reported_seconds():
    batches = cheapest_batches([0.004, 0.005, 0.0055, 0.012], 11)

    assert sum(batches.sizes(11)) == 11
    assert sum([0.004, 0.005, 0.0055, 0.012][size - 1] for size in batches.sizes(11)) == pytest.approx(
        batches.seconds[11]
    )


@pytest.mark.parametrize(
    ("floor", "probability", "rows"), [(0.7, 0.95, 64), (0.6, 0.9, 8), (0.8, 0.99, 32), (0.5, 0.5, 7)]
)
def test_floor_with_probability_holds_in_simulation(floor, probability, rows):
    mean, rng = required_mean(floor, rows, probability), np.random.default_rng(1)
    spread = min(1 - mean, mean, 0.15)
    for accuracies in (np.full(rows, mean), mean + spread * np.linspace(-1, 1, rows)):
        right = (rng.random((40_000, rows)) < accuracies).sum(axis=1)
        held = float((right >= ceil(floor * rows - 1e-9)).mean())
        assert held >= probability - 3 * (probability * (1 - probability) / 40_000) ** 0.5


def test_floor_with_probability_is_tight():
    mean = required_mean(0.7, 64, 0.95)

    assert binomial_tail(ceil(0.7 * 64), 64, mean - 1e-3) < 0.95
    assert required_mean(0.7, 64) == 0.7
    with pytest.raises(ValueError, match="probability"):
        required_mean(0.7, 64, 1.0)


def test_floors_of_many_job_sizes_use_little_memory():
    required_mean(0.5, 20_000, 0.9)
    tracemalloc.start()
    try:
        for rows in range(20_001, 20_033):
            required_mean(0.5, rows, 0.9)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert held_bytes < 1_000_000


OPTIONS = [(0.001, 0.6), (0.004, 0.7), (0.003, 0.75), (0.01, 0.8)]


def test_point_below_the_hull_is_no_corner():
    assert best_mixes(OPTIONS) == [(0.0, 0.0), (0.001, 0.6), (0.003, 0.75), (0.01, 0.8)]


@pytest.mark.parametrize(
    ("seconds_a_row", "price"), [(0.02, 0.0), (0.005, 0.05 / 0.007), (0.002, 0.15 / 0.002), (0.0005, 600.0)]
)
def test_price_is_the_gain_of_the_last_second(seconds_a_row, price):
    assert shadow_price(OPTIONS, 2 * BUSY_SHARE / seconds_a_row, replicas=2) == pytest.approx(price)


def test_price_is_zero_without_load():
    assert shadow_price(OPTIONS, 0.0, 1) == 0.0
    assert shadow_price([], 100.0, 1) == 0.0


def a_stage_plan(**changes):
    best, fast = ({"accuracy": accuracy, "serviceSeconds": {"8": 8 * seconds}} for seconds, accuracy in OPTIONS[::-3])
    points = {"operatingPoint": "best", "fallbacks": [{"name": "fast"} | fast]} | best
    return StagePlan.model_validate({"name": "a", "variant": "b", "batchSize": 8, "replicas": 2} | points | changes)


def test_observed_price_equals_price_of_slower_profile():
    slower = [(3.0 * seconds, accuracy) for seconds, accuracy in OPTIONS[::-3]]
    for rows_rps in (100.0, 300.0, 800.0):
        plan = with_shadow_price(a_stage_plan(), rows_rps)

        assert observed_shadow_price(plan, 1.0) == plan.shadow_price == shadow_price(OPTIONS[::-3], rows_rps, 2)
        assert observed_shadow_price(plan, 3.0) == pytest.approx(shadow_price(slower, rows_rps, 2))


def test_price_without_rate_is_unchanged():
    assert observed_shadow_price(a_stage_plan(shadowPrice=7.0), 3.0) == 7.0
