"""IPA's evaluation: dominance over seeds, noise, and cells without requests."""

from math import nan

import pytest

from benchmarks.harness.grid import Cell, Evaluation
from benchmarks.papers.ipa import judge, place
from benchmarks.papers.ipa_cells import ORACLE, OURS, REACTIVE, PlannerRow

CASE = ("nlp", "bursty")


def a_row(method, cores=4.0, served=0.8, violations=0.0, seed=1):
    return PlannerRow(Cell(CASE, method, seed=seed), 100, served, served, cores, violations, 0.0, 0.0, 0.1)


def rows(method, cores, served):
    return [a_row(method, c, a, seed=seed) for seed, (c, a) in enumerate(zip(cores, served, strict=True))]


SAME = [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("ours", "rival", "standing"),
    [
        (([4, 4, 4], SAME), ([6, 6, 6], SAME), "above"),
        (([4, 4, 4], SAME), ([4, 4, 4], SAME), "on"),
        (([6, 6, 6], SAME), ([4, 4, 4], SAME), "below FA2-low"),
        (([4, 4, 4], SAME), ([4, 4, 4], [0.6, 0.6, 0.6]), "below FA2-low"),
        (([4, 5, 4.1], SAME), ([4.2, 4.2, 4.5], SAME), "on"),
    ],
    ids=["cheaper", "equal", "rival cheaper", "rival more accurate", "within the noise"],
)
def test_standing_compares_plans_with_each_baseline(ours, rival, standing):
    evaluation = Evaluation([*rows(OURS, *ours), *rows("FA2-low", *rival)])

    assert place(evaluation, CASE).label == standing


def test_margin_is_over_the_best_rival_with_no_more_cores():
    rivals = [*rows("FA2-low", [2, 2], [0.4, 0.4]), *rows("FA2-high", [6, 6], [0.8, 0.8])]

    assert place(Evaluation([*rows(OURS, [4, 4], [0.5, 0.5]), *rivals]), CASE).margin == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("ours", "oracle", "holds"),
    [(0.005, 0, True), (0.5, 0, False), (nan, 0, False), (nan, nan, False), (0.5, 0.5, False)],
)
def test_unavoidable_or_unknown_violations_do_not_hold(ours, oracle, holds):
    others = [a_row(method) for method in (REACTIVE, "RIM")]
    evaluation = Evaluation([a_row(OURS, violations=ours), a_row(ORACLE, violations=oracle), *others])

    assert judge(evaluation, 1.0).holds is holds
    assert not judge(evaluation, 1.0, mixes=True).holds
    assert not judge(Evaluation([]), 1.0).holds
