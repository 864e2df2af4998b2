"""Job strategies: equal to brute force, floors that hold, and a document that reads back."""

import itertools
import tracemalloc
from math import ceil, inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as draw

from trimtab_pipelines.accuracy_floor import binomial_tail, required_mean
from trimtab_pipelines.row_splits import SplitOption, accuracy_units, cheapest_batches, escalation_option, pareto_fronts
from trimtab_pipelines.strategies import Escalation, PointCost, Variant, strategies_of

VARIANT = Variant("digits-av", "classify", "early", 1.0)
MILLISECONDS = draw.integers(1, 40)
POINTS = draw.lists(
    draw.tuples(draw.integers(1000, 9999), draw.lists(MILLISECONDS, min_size=1, max_size=4)), min_size=1, max_size=3
)


def a_point(name, accuracy, milliseconds):
    return PointCost(name, accuracy, tuple(each / 1000 for each in milliseconds))


def brute_force_batches(single, rows):
    """The least seconds of rows, over every multiset of batches."""
    if not rows:
        return 0.0
    return min(
        single[size - 1] + brute_force_batches(single, rows - size) for size in range(1, min(rows, len(single)) + 1)
    )


def brute_force(points, rows, floor):
    """The least seconds over every share of rows among points that meets the floor; infinite where none does."""
    best = inf
    for counts in itertools.product(range(rows + 1), repeat=len(points)):
        right = sum(count * accuracy_units(point.accuracy) for count, point in zip(counts, points, strict=True))
        if sum(counts) == rows and right >= round(floor * 1e4) * rows:
            best = min(
                best,
                sum(brute_force_batches(point.batch_seconds, n) for n, point in zip(counts, points, strict=True)),
            )
    return best


@settings(max_examples=60, deadline=None)
@given(POINTS, draw.integers(1, 6), draw.integers(0, 10_000))
def test_the_cheapest_for_a_floor_is_that_of_brute_force(drawn, rows, floor):
    points = [a_point(f"p{n}", units / 1e4, table) for n, (units, table) in enumerate(drawn)]
    found = strategies_of(VARIANT, points, most_rows=rows).of(rows).cheapest(floor / 1e4)
    expected = brute_force(points, rows, floor / 1e4)

    if expected == inf:
        assert found is None
    else:
        assert found is not None
        assert found.seconds == pytest.approx(expected)
        assert found.accuracy >= floor / 1e4 - 1e-9
        assert sum(found.rows.values()) == rows


def test_a_front_rises_in_both_and_tells_its_own_sums():
    points = [
        a_point("a", 0.52, [3, 4, 5, 7]),
        a_point("at", 0.78, [4, 6, 8, 11]),
        a_point("avt", 0.8, [9, 18, 26, 35]),
    ]
    ways = [SplitOption(p.name, p.accuracy, cheapest_batches(p.batch_seconds, 16).seconds) for p in points]
    for rows, front in enumerate(pareto_fronts(ways, 16)):
        assert (np.diff(front.accuracy) > 0).all()
        assert (np.diff(front.seconds) > 0).all()
        assert (front.rows.sum(axis=1) == rows).all()
        seconds = [sum(way.seconds[n] for way, n in zip(ways, split, strict=True)) for split in front.rows]
        np.testing.assert_allclose(front.seconds, seconds)


def test_batches_of_a_number_of_rows_cost_what_was_promised():
    batches = cheapest_batches([0.004, 0.005, 0.0055, 0.012], 11)

    assert sum(batches.sizes(11)) == 11
    assert sum([0.004, 0.005, 0.0055, 0.012][size - 1] for size in batches.sizes(11)) == pytest.approx(
        batches.seconds[11]
    )


def test_looking_twice_is_a_way_like_any_other():
    points = [a_point("at", 0.78, [1, 1, 1, 2]), a_point("avt", 0.8, [10, 20, 30, 40])]
    twice = Escalation("at", "avt", 0.25, 0.797)
    found = strategies_of(VARIANT, points, [twice], most_rows=8).of(8).cheapest(0.795)
    once = strategies_of(VARIANT, points, most_rows=8).of(8).cheapest(0.795)

    assert found is not None
    assert once is not None
    assert found.rows[twice.name] >= 6
    assert found.seconds < once.seconds


def test_the_least_certain_are_counted_up():
    first, then = cheapest_batches([0.001], 5), cheapest_batches([0.01], 5)

    assert escalation_option("x", first, then, 0.3, 0.8).seconds == pytest.approx(
        (0, 0.011, 0.012, 0.013, 0.024, 0.025)
    )


def test_a_floor_that_nothing_meets_has_no_strategy():
    size = strategies_of(VARIANT, [a_point("a", 0.5, [1])], most_rows=4).of(4)

    assert size.cheapest(0.5) is not None
    assert size.cheapest(0.51) is None
    assert size.cheapest(0.5, probability=0.9) is None


def test_a_job_larger_than_any_is_refused_with_the_largest_there_is():
    with pytest.raises(KeyError, match="1 to 4 rows, not 5"):
        strategies_of(VARIANT, [a_point("a", 0.5, [1])], most_rows=4).of(5)


@pytest.mark.parametrize(
    ("floor", "probability", "rows"), [(0.7, 0.95, 64), (0.6, 0.9, 8), (0.8, 0.99, 32), (0.5, 0.5, 7)]
)
def test_a_floor_with_a_probability_holds_in_simulation_however_rows_are_mixed(floor, probability, rows):
    mean, rng = required_mean(floor, rows, probability), np.random.default_rng(1)
    spread = min(1 - mean, mean, 0.15)
    for accuracies in (np.full(rows, mean), mean + spread * np.linspace(-1, 1, rows)):
        right = (rng.random((40_000, rows)) < accuracies).sum(axis=1)
        held = float((right >= ceil(floor * rows - 1e-9)).mean())
        assert held >= probability - 3 * (probability * (1 - probability) / 40_000) ** 0.5


def test_a_floor_with_a_probability_asks_for_no_more_than_it_must():
    mean = required_mean(0.7, 64, 0.95)

    assert binomial_tail(ceil(0.7 * 64), 64, mean - 1e-3) < 0.95
    assert required_mean(0.7, 64) == 0.7
    with pytest.raises(ValueError, match="leave it out"):
        required_mean(0.7, 64, 1.0)


def test_floors_of_jobs_of_many_sizes_leave_little_behind():
    required_mean(0.5, 20_000, 0.9)
    tracemalloc.start()
    try:
        for rows in range(20_001, 20_033):
            required_mean(0.5, rows, 0.9)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert held_bytes < 1_000_000
