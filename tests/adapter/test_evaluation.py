"""Evaluation of plans against a Pareto front: dominance over seeds, and noise."""

import math

import pytest

from benchmarks.ipa.cells import OURS, Cell, Measured
from benchmarks.ipa.verdict import by_method, interval, place


def cells(method, cores, served):
    """One cell a seed."""
    return [
        Measured(Cell("p", "w", method, seed), 1000, a, a, c, 0.0, 0.0, 0.0, 0.1, 0)
        for seed, (c, a) in enumerate(zip(cores, served, strict=True))
    ]


def standing(ours, rival):
    return place(by_method([*cells(OURS, *ours), *cells("FA2-low", *rival)]), "p", "w")


def test_cheaper_and_as_accurate_is_not_below():
    assert standing(([4, 4, 4], [0.5, 0.5, 0.5]), ([6, 6, 6], [0.5, 0.5, 0.5])).standing == "above"


def test_the_same_point_is_on_the_front():
    found = standing(([4, 4, 4], [0.5, 0.5, 0.5]), ([4, 4, 4], [0.5, 0.5, 0.5]))

    assert found.standing == "on"
    assert found.margin == pytest.approx(0.0)


def test_a_rival_that_is_cheaper_and_no_worse_beats_us_by_name():
    found = standing(([6, 6, 6], [0.5, 0.5, 0.5]), ([4, 4, 4], [0.5, 0.5, 0.5]))

    assert (found.standing, found.beaten_by) == ("below", "FA2-low")


def test_more_accuracy_for_as_many_cores_beats_us_too():
    assert standing(([4, 4, 4], [0.5, 0.5, 0.5]), ([4, 4, 4], [0.6, 0.6, 0.6])).standing == "below"


def test_a_difference_within_the_seeds_noise_does_not():
    assert standing(([4, 5, 4.1], [0.5, 0.5, 0.5]), ([4.2, 4.2, 4.5], [0.5, 0.5, 0.5])).standing == "on"


def test_a_mixture_of_rivals_is_a_harder_front():
    rivals = [*cells("FA2-low", [2, 2], [0.4, 0.4]), *cells("FA2-high", [6, 6], [0.8, 0.8])]
    found = place(by_method([*cells(OURS, [4, 4], [0.5, 0.5]), *rivals]), "p", "w")

    assert found.margin == pytest.approx(0.1)
    assert found.mixture_margin == pytest.approx(-0.1)


def test_intervals_follow_student():
    found = interval([1.0, 2.0, 3.0])

    assert found.mean == 2.0
    assert found.half == pytest.approx(4.303 * 1.0 / math.sqrt(3))
    assert math.isnan(interval([1.0]).half)
