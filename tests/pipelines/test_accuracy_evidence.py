"""Evidence of an accuracy: mean confidence, and how it is reported."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_pipelines.accuracy_evidence import mean_confidence, measured_accuracy, wilson_interval

DIGEST = f"sha256:{64 * '0'}"


@pytest.mark.parametrize(
    ("confidences", "tasks", "mean"),
    [
        ([0.9, 0.5, 0.40004], ("cats", "cats", "cats"), 0.6),
        ([0.9, 0.5], (), 0.7),
        ([0.9, 0.5], ("cats", "dogs"), None),
        ([0.9, math.nan], (), None),
        ([0.9, 3.1], (), None),
        ([], (), None),
    ],
)
def test_mean_confidence_requires_probabilities_of_one_task(confidences, tasks, mean):
    assert mean_confidence(confidences, tasks) == mean


def test_measured_accuracy_has_confidence_and_samples_digest():
    found = measured_accuracy(3, 4, [0.5, 0.75, 1.0, 0.75], DIGEST)

    assert (found.value, found.samples, found.source) == (0.75, 4, "Measured")
    assert (found.mean_confidence, found.samples_digest) == (0.75, DIGEST)
    assert measured_accuracy(3, 4) == found.model_copy(update={"mean_confidence": None, "samples_digest": None})


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_encloses_the_share_and_stays_a_probability(case):
    right, n = case
    low, high = wilson_interval(right, n)

    assert 0 <= low <= right / n <= high <= 1


def test_wilson_gives_the_textbook_interval():
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)


def test_wilson_of_no_answers_is_rejected():
    with pytest.raises(ValueError, match="n must be positive"):
        wilson_interval(0, 0)
