"""Accuracies: their evidence, and PAS and PAS' as the IPA paper defines them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import a_pipeline, a_stage, a_variant
from trimtab_pipelines.accuracy import normalised_ranks, pipeline_accuracy, stage_values
from trimtab_pipelines.accuracy_evidence import mean_confidence, measured_accuracy, wilson_interval
from trimtab_pipelines.spec import Objective

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


def test_pas_is_the_product():
    assert pipeline_accuracy([0.457, 0.6975], "Product") == pytest.approx(0.31876, abs=1e-5)


def test_ranks_run_from_zero_to_one():
    assert normalised_ranks([0.7, 0.5, 0.9]) == {0.5: 0.0, 0.7: 0.5, 0.9: 1.0}
    assert normalised_ranks([0.8]) == {0.8: 1.0}


def test_each_operating_point_has_its_own_value():
    points = [{"name": "full", "accuracy": 0.9}, {"name": "merged", "tokenDelta": -8, "accuracy": 0.8}]
    stage = a_pipeline([a_stage(variants=[a_variant(operatingPoints=points)])]).spec.stages[0]

    assert stage_values(stage, Objective()) == {("small", "full"): 0.9, ("small", "merged"): 0.8}
    ranked = stage_values(stage, Objective(accuracy_metric="NormalizedRanks"))
    assert ranked == {("small", "full"): 1.0, ("small", "merged"): 0.0}
