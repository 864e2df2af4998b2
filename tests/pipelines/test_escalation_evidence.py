"""Escalations between variants: figures on rows that chose no threshold, and the ones worth keeping."""

import numpy as np
import pytest

from trimtab_pipelines.escalation import Escalation
from trimtab_pipelines.escalation_evidence import ScoredRows, held_out_escalations, judge
from trimtab_pipelines.escalation_pruning import MAX_PER_PAIR, undominated_escalations

LIGHT, MIDDLE, HEAVY = ("light", "default"), ("middle", "default"), ("heavy", "default")
ACCURACIES = {LIGHT: 0.8, MIDDLE: 0.85, HEAVY: 0.9}


def escalation(variant: str, share: float, accuracy: float) -> Escalation:
    return Escalation(to="default", variant=variant, confidence_below=0.5, share=share, accuracy=accuracy)


def variants(rows: int, seed: int) -> dict[tuple[str, str], ScoredRows]:
    """A light variant that is wrong on its least confident rows, and a heavy one that errs on others."""
    rng = np.random.default_rng(seed)
    confidence = rng.random(rows)
    ones = np.ones(rows, np.int64)
    light = (rng.random(rows) < np.where(confidence < 0.2, 0.3, 0.98)).astype(np.int64)
    heavy = (rng.random(rows) < 0.95).astype(np.int64)
    return {LIGHT: ScoredRows(confidence, light, ones), HEAVY: ScoredRows(np.full(rows, 0.95), heavy, ones)}


def test_figures_are_those_of_unseen_rows() -> None:
    points, truth = variants(6_000, 1), variants(400_000, 2)
    chosen_on = np.arange(6_000) % 3 == 0
    found = held_out_escalations(points, chosen_on, {LIGHT: 1e-4, HEAVY: 1e-3})

    assert found[HEAVY] == ()
    assert 0 < len(found[LIGHT]) <= MAX_PER_PAIR
    for again in found[LIGHT]:
        unseen = truth[LIGHT].escalated(truth[HEAVY], again.confidence_below).accuracy
        assert again.variant == "heavy"
        assert again.samples == 4_000
        assert again.accuracy_low is not None
        assert again.accuracy_low < unseen
        assert again.accuracy == pytest.approx(unseen, abs=0.012)
    best = max(again.accuracy for again in found[LIGHT])
    assert best > points[HEAVY].accuracy + 0.01, "the two err on different rows"


def test_rows_with_several_results_count_each_of_them() -> None:
    """Of two pages, the second is escalated: it then has two of three results instead of one of two."""
    confidence = np.array([0.9, 0.1])
    first = ScoredRows(confidence, np.array([1, 1]), np.array([1, 2]))
    then = ScoredRows(confidence, np.array([0, 2]), np.array([1, 3]))
    judged = judge(escalation("heavy", 0.9, 0.9), first, then, factor=0.8)

    assert first.sample().right.tolist() == [True, False]
    assert (judged.share, judged.accuracy, judged.samples) == (0.5, 0.6, 2)
    assert judged.accuracy_low is not None
    assert judged.accuracy_low < 0.6


def test_dominated_escalations_are_removed() -> None:
    cheap, dear, weak = escalation("heavy", 0.1, 0.9), escalation("heavy", 0.5, 0.89), escalation("middle", 0.1, 0.84)
    by_point = {LIGHT: (cheap, dear, weak), MIDDLE: (escalation("heavy", 0.2, 0.895),)}

    by_weight = undominated_escalations(by_point, ACCURACIES)
    by_seconds = undominated_escalations(by_point, ACCURACIES, {LIGHT: 1.0, MIDDLE: 1.05, HEAVY: 9.0})

    assert by_weight == {LIGHT: (cheap, weak), MIDDLE: ()}
    assert by_seconds == {LIGHT: (cheap,), MIDDLE: ()}, "the middle variant alone beats its use after the light one"


def test_negligible_gain_justifies_no_costlier_escalation() -> None:
    noise, gain, cheaper = (escalation("heavy", *pair) for pair in ((0.97, 0.901), (0.96, 0.904), (0.4, 0.9005)))
    found = undominated_escalations({LIGHT: (noise, gain, cheaper)}, {LIGHT: 0.8, HEAVY: 0.9}, {LIGHT: 1.0, HEAVY: 2.0})

    assert found[LIGHT] == (gain, cheaper)


def test_only_a_few_escalations_remain_per_pair() -> None:
    many = tuple(escalation("heavy", share / 10, 0.8 + share / 100) for share in range(1, 9))
    own = tuple(again.replace(variant=None, to="full") for again in many)
    accuracies = ACCURACIES | {("light", "full"): 0.95}
    found = undominated_escalations({LIGHT: (*many, *own)}, accuracies)

    assert [again.share for again in found[LIGHT] if again.variant] == [0.1, 0.5, 0.8]
    assert [again for again in found[LIGHT] if not again.variant] == [*own]
