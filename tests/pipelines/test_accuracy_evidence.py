"""What stands behind an accuracy: mean confidence, and what is told of it."""

import math

import pytest

from trimtab_pipelines.accuracy_evidence import mean_confidence, measured_accuracy

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
def test_a_mean_is_of_all_rows_of_one_kind_each_told_as_a_probability(confidences, tasks, mean):
    assert mean_confidence(confidences, tasks) == mean


def test_what_was_measured_tells_how_certain_the_model_was_and_of_which_samples():
    found = measured_accuracy(3, 4, [0.5, 0.75, 1.0, 0.75], DIGEST)

    assert (found.value, found.samples, found.source) == (0.75, 4, "Measured")
    assert (found.mean_confidence, found.samples_digest) == (0.75, DIGEST)
    assert measured_accuracy(3, 4) == found.model_copy(update={"mean_confidence": None, "samples_digest": None})
