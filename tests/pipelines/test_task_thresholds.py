"""Escalation thresholds by task: chosen by gain, without chance gains."""

import numpy as np

from trimtab_pipelines.escalation import Escalation
from trimtab_pipelines.escalation_thresholds import (
    ConfidenceSample,
    PairedAnswers,
    best_threshold,
    escalations,
    task_thresholds,
)


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


def made_right(look: Escalation, seen: dict[str, ConfidenceSample]) -> float:
    """Accuracy of all rows after escalating those below their task's threshold."""
    fast, full = seen["fast"], seen["full"]
    assert fast.tasks is not None
    below = np.array([look.by_task[task].confidence_below for task in fast.tasks.tolist()])
    return float(np.where(fast.confidence < below, full.right, fast.right).mean())


def test_task_without_gain_is_not_escalated() -> None:
    found = escalations(of_tasks(1, 2_000))
    looks, truth = found["fast"], of_tasks(2, 100_000)

    assert found["full"] == ()
    assert looks
    for look in looks:
        assert look.by_task["hard"].confidence_below == look.by_task["hard"].share == 0
        assert 0.15 < look.by_task["easy"].confidence_below <= 0.25
        assert look.accuracy_low is not None
        assert look.accuracy_low <= made_right(look, truth)
        assert all(one.accuracy_low is not None and one.accuracy_low < one.accuracy for one in look.by_task.values())
    assert looks[-1].share < 0.13, "a fifth of one of two tasks"
    mixed = escalations(
        {name: ConfidenceSample(one.confidence, one.right) for name, one in of_tasks(1, 2_000).items()}
    )["fast"]
    assert min(look.share for look in mixed if look.accuracy >= looks[-1].accuracy - 0.01) > 2 * looks[-1].share


def test_high_price_escalates_only_least_confident_rows() -> None:
    confidence = np.arange(100) / 100
    again = np.arange(100) < 60
    answers = PairedAnswers(confidence, (np.arange(100) >= 20) & again, again)  # the first twenty are mended

    assert best_threshold(answers, 0.0) == 0.2
    half = PairedAnswers(confidence, answers.right | (np.arange(100) % 2 == 1), again | (np.arange(100) % 2 == 1))
    assert best_threshold(half, 0.4) > 0.15
    assert best_threshold(half, 1.0) == 0.0
    assert best_threshold(answers.subset(np.zeros(100, bool)), 0.0) == 0.0


def test_chance_gains_are_removed_by_cross_fitting() -> None:
    """Neither point is better; the thresholds that look best on these rows still win a few of them."""
    won, cross_fitted = [], []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        answers = PairedAnswers(rng.random(200), rng.random(200) < 0.5, rng.random(200) < 0.5)
        (doubt, *_) = task_thresholds({"one": answers})
        first = int(answers.right.sum())
        won.append(answers.hits(doubt["one"].below) - first)
        cross_fitted.append(doubt["one"].hits - first)

    assert np.mean(won) > 4
    assert abs(np.mean(cross_fitted)) < 3.5 * np.std(cross_fitted) / 40**0.5
    assert abs(np.mean(cross_fitted)) < np.mean(won) / 2


def test_higher_price_never_escalates_more() -> None:
    seen = of_tasks(3, 1_000)
    fast, full = seen["fast"], seen["full"]
    shares = [
        doubt["all"].share for doubt in task_thresholds({"all": PairedAnswers(fast.confidence, fast.right, full.right)})
    ]

    assert shares == sorted(shares, reverse=True)
    assert len(set(shares)) == len(shares)
