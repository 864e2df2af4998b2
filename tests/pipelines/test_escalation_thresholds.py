"""Escalation thresholds: rows that are retained, accuracy floors for unseen rows, and gains by task."""

import numpy as np
import pytest

from trimtab_pipelines.escalation import MAX_ESCALATIONS, Escalation
from trimtab_pipelines.escalation_thresholds import (
    ConfidenceSample,
    PairedConfidence,
    best_threshold,
    evaluate_threshold,
    measure_escalations,
    safe_threshold,
    task_thresholds,
)


def a_sample(rng, rows, shift=0.0):
    """A cheap point that knows how certain it is (78 % right on average), and a better one (about 88 %)."""
    confidence = np.clip(rng.beta(5, 1.4, rows) + shift, 0, 1)
    right = rng.random(rows) < confidence
    right_escalated = np.where(rng.random(rows) < 0.9, right | (rng.random(rows) < 0.5), rng.random(rows) < 0.8)
    return PairedConfidence(confidence, right, right_escalated)


def test_safe_threshold_keeps_its_floor_with_its_confidence():
    """The truth about each threshold is that of a very large sample; so is the choice made two hundred times."""
    truth = a_sample(np.random.default_rng(2), 400_000)
    floor, broken, chosen = 0.84, 0, 0
    for seed in range(200):
        found = safe_threshold(a_sample(np.random.default_rng(100 + seed), 2000), floor)
        if found is not None:
            chosen += 1
            broken += evaluate_threshold(truth, found.below).accuracy < floor
    assert chosen > 150
    assert broken / 200 <= 0.05 + 3 * (0.05 * 0.95 / 200) ** 0.5


def test_unreachable_floor_has_no_threshold():
    assert safe_threshold(a_sample(np.random.default_rng(4), 2000), 0.97) is None


def test_unpaired_rows_are_rejected():
    with pytest.raises(ValueError, match="got 3, 2 and 3"):
        PairedConfidence(np.ones(3), np.ones(2, bool), np.ones(3, bool))


def test_escalation_floors_hold_for_unseen_rows():
    sample, truth = a_sample(np.random.default_rng(5), 4000), a_sample(np.random.default_rng(6), 400_000)
    points = {
        "a": ConfidenceSample(sample.confidence, sample.right, frozenset("a")),
        "av": ConfidenceSample(sample.confidence, sample.right_escalated, frozenset("av")),
    }
    found = measure_escalations(points)

    assert found["av"] == ()
    assert len(found["a"]) >= 3
    assert [escalation.share for escalation in found["a"]] == sorted(escalation.share for escalation in found["a"])
    for escalation in found["a"]:
        assert escalation.to == "av"
        assert escalation.accuracy_low is not None
        assert escalation.accuracy_low < escalation.accuracy
        assert evaluate_threshold(truth, escalation.confidence_below).accuracy >= escalation.accuracy_low


def test_point_with_other_inputs_is_no_escalation_target():
    sample = a_sample(np.random.default_rng(7), 2000)
    points = {
        "a": ConfidenceSample(sample.confidence, sample.right, frozenset("a")),
        "v": ConfidenceSample(sample.confidence, sample.right_escalated, frozenset("v")),
    }
    assert measure_escalations(points) == {"a": (), "v": ()}


def merged(rng, rows, loses):
    """One model at three points that all read the same: what merging loses is among the least certain rows."""
    confidence = rng.beta(4, 1.2, rows)
    right = rng.random(rows) < confidence
    spoilt = right & (rng.random(rows) < loses * 2 * (confidence < np.median(confidence)))
    return {"full": ConfidenceSample(confidence, right), "merged": ConfidenceSample(confidence, right & ~spoilt)}


def test_point_with_same_inputs_escalates_if_more_accurate():
    found = merged(np.random.default_rng(8), 3000, 0.1)
    escalations = measure_escalations(found)

    assert escalations["full"] == ()
    assert {escalation.to for escalation in escalations["merged"]} == {"full"}
    for escalation in escalations["merged"]:
        assert escalation.accuracy >= found["merged"].right.mean() + 0.0049
    assert min(escalation.share for escalation in escalations["merged"]) < 0.5


def test_insignificant_gain_is_no_escalation():
    """Ten rows of a thousand more are right, but those on which the two differ are as many that it gets wrong."""
    rng = np.random.default_rng(10)
    confidence, right = rng.random(1000), rng.random(1000) < 0.6
    other = right.copy()
    other[:60] = True
    right[:60], other[60:110], right[60:110] = False, False, True

    assert other.mean() - right.mean() == pytest.approx(0.01)
    samples = {"a": ConfidenceSample(confidence, right), "b": ConfidenceSample(confidence, other)}
    assert measure_escalations(samples) == {"a": (), "b": ()}


def test_escalations_are_limited_per_operating_point():
    rng = np.random.default_rng(11)
    confidence = rng.random(4000)
    chance = rng.random(4000)
    points = {f"p{n}": ConfidenceSample(confidence, chance < 0.3 + 0.05 * n + 0.2 * confidence) for n in range(9)}
    found = measure_escalations(points)

    assert len({escalation.to for escalation in found["p0"]}) == 8
    assert max(len(escalations) for escalations in found.values()) <= MAX_ESCALATIONS


def of_tasks(seed: int, rows: int) -> dict[str, ConfidenceSample]:
    """`easy` is right where it is certain, and the better point mends the rest; `hard` is never certain nor mended."""
    rng = np.random.default_rng(seed)
    easy, hard = rng.random(rows), 0.4 * rng.random(rows)
    right, chance = easy > 0.2, rng.random(rows) < 0.3
    tasks = np.repeat(["easy", "hard"], rows)
    confidence = np.concatenate([easy, hard])
    better = np.concatenate([right | (rng.random(rows) < 0.9), chance])
    return {
        "fast": ConfidenceSample(confidence, np.concatenate([right, chance]), tasks=tasks),
        "full": ConfidenceSample(confidence, better, tasks=tasks),
    }


def escalated_accuracy(escalation: Escalation, samples: dict[str, ConfidenceSample]) -> float:
    fast, full = samples["fast"], samples["full"]
    assert fast.tasks is not None
    below = np.array([escalation.by_task[task].confidence_below for task in fast.tasks.tolist()])
    return float(np.where(fast.confidence < below, full.right, fast.right).mean())


def test_task_without_gain_is_not_escalated() -> None:
    found = measure_escalations(of_tasks(1, 2_000))
    escalations, truth = found["fast"], of_tasks(2, 100_000)

    assert found["full"] == ()
    assert escalations
    for escalation in escalations:
        assert escalation.by_task["hard"].confidence_below == escalation.by_task["hard"].share == 0
        assert 0.15 < escalation.by_task["easy"].confidence_below <= 0.25
        assert escalation.accuracy_low is not None
        assert escalation.accuracy_low <= escalated_accuracy(escalation, truth)
        for by_task in escalation.by_task.values():
            assert by_task.accuracy_low is not None
            assert by_task.accuracy_low < by_task.accuracy
    assert escalations[-1].share < 0.13, "a fifth of one of two tasks"
    mixed = measure_escalations(
        {name: ConfidenceSample(one.confidence, one.right) for name, one in of_tasks(1, 2_000).items()}
    )["fast"]
    as_accurate = [escalation for escalation in mixed if escalation.accuracy >= escalations[-1].accuracy - 0.01]
    assert min(escalation.share for escalation in as_accurate) > 2 * escalations[-1].share


def test_high_price_escalates_only_least_confident_rows() -> None:
    confidence = np.arange(100) / 100
    again = np.arange(100) < 60
    answers = PairedConfidence(confidence, (np.arange(100) >= 20) & again, again)  # the first twenty are mended

    assert best_threshold(answers, 0.0) == 0.2
    half = PairedConfidence(confidence, answers.right | (np.arange(100) % 2 == 1), again | (np.arange(100) % 2 == 1))
    assert best_threshold(half, 0.4) > 0.15
    assert best_threshold(half, 1.0) == 0.0
    assert best_threshold(answers.subset(np.zeros(100, bool)), 0.0) == 0.0


def test_chance_gains_are_removed_by_cross_fitting() -> None:
    """Neither point is better; the thresholds that look best on these rows still win a few of them."""
    won, cross_fitted = [], []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        answers = PairedConfidence(rng.random(200), rng.random(200) < 0.5, rng.random(200) < 0.5)
        (doubt, *_) = task_thresholds({"one": answers})
        first = int(answers.right.sum())
        won.append(answers.hits(doubt["one"].below) - first)
        cross_fitted.append(doubt["one"].hits - first)

    assert np.mean(won) > 4
    assert abs(np.mean(cross_fitted)) < 3.5 * np.std(cross_fitted) / 40**0.5
    assert abs(np.mean(cross_fitted)) < np.mean(won) / 2


def test_higher_price_never_escalates_more() -> None:
    samples = of_tasks(3, 1_000)
    fast, full = samples["fast"], samples["full"]
    shares = [
        doubt["all"].share
        for doubt in task_thresholds({"all": PairedConfidence(fast.confidence, fast.right, full.right)})
    ]

    assert shares == sorted(shares, reverse=True)
    assert len(set(shares)) == len(shares)


def test_rounding_of_sure_rows_changes_no_share():
    """Confidences reach evaluation with four digits, and schedulers as they are."""
    rng = np.random.default_rng(8)
    exact = 1 - 10.0 ** rng.uniform(-8, -0.3, 4000)
    better, right = rng.random(4000) < 0.99, rng.random(4000) < exact - 0.1

    points = {
        "fast": ConfidenceSample(exact.round(4), right),
        "exact": ConfidenceSample(np.ones(4000), right | better),
    }
    found = measure_escalations(points)["fast"]

    assert found
    for escalation in found:
        assert (exact < escalation.confidence_below).mean() == pytest.approx(escalation.share, abs=0.005)
