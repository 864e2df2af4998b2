"""Operating points, their accuracies and evidence, and PAS and PAS' as the IPA paper defines them."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.builders import a_pipeline, a_stage, a_variant
from trimtab_pipelines.accuracy import accuracy_values, normalised_ranks, pipeline_accuracy
from trimtab_pipelines.accuracy_evidence import Accuracy, mean_confidence, measured_accuracy, wilson_interval
from trimtab_pipelines.escalation import Escalation, TaskEscalation
from trimtab_pipelines.operating_point import OperatingPoint, TokenMerging, TokenPrompts
from trimtab_pipelines.spec import Objective
from trimtab_pipelines.stages import StageInput
from trimtab_pipelines.variants import Variant


def a_point(**changes: Any) -> OperatingPoint:
    return OperatingPoint.model_validate({"name": "some", "accuracy": 0.9} | changes)


@pytest.mark.parametrize(
    ("delta", "merging", "prompts"),
    [(-8, TokenMerging(schedule=(8,)), None), (2, None, TokenPrompts(count=2)), (0, None, None), (None, None, None)],
)
def test_token_delta_expands_to_merging_or_prompts(delta, merging, prompts):
    point = a_point(tokenDelta=delta)

    assert (point.merging, point.prompts, point.token_delta) == (merging, prompts, None)
    assert OperatingPoint.model_validate(point.model_dump(mode="json", by_alias=True, exclude_none=True)) == point


def test_removed_task_keeps_its_number_and_loads_nothing():
    present, gone = {"name": "new", "storageUri": "s3://tasks/new"}, {"name": "old", "removed": True}
    variant = Variant.model_validate(a_variant(tasks=[gone, present]))

    assert [task.name for task in variant.loaded_tasks] == ["new"]
    assert variant.storage_uris == (variant.storage_uri, "s3://tasks/new")
    with pytest.raises(ValidationError, match="storageUri or removed: true"):
        Variant.model_validate(a_variant(tasks=[present | {"removed": True}]))


def test_knobs_are_described_by_field_name():
    point = a_point(
        modalities=["image"],
        merging={"schedule": [16, 8], "rule": "bipartite"},
        prompts={"count": 4, "mode": "Accumulate"},
        precision="INT8",
        compiled="inductor",
        inputSize={"resolution": 160, "patch": 16},
    )

    assert point.knobs == {
        "modalities": "reads image",
        "merging": "merges 16, 8 tokens layer by layer by bipartite",
        "prompts": "adds 4 prompts (Accumulate)",
        "precision": "INT8",
        "compiled": "inductor",
        "inputSize": "images of 160 pixels, patches of 16 pixels",
    }
    assert a_point().knobs == {}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tokenDelta": -9999}, "tokenDelta"),
        ({"merging": {"schedule": []}}, "merging.schedule"),
        ({"merging": {"schedule": [-1]}}, "merging.schedule.0"),
        ({"prompts": {"count": 0}}, "prompts.count"),
        ({"precision": "FP64"}, "precision"),
        ({"quantised": True}, "quantised"),
        ({"accuracyByTask": {"crops": {"value": 0.9, "high": 0.8}}}, "accuracyByTask.crops"),
    ],
)
def test_invalid_operating_point_is_rejected(changes, field):
    with pytest.raises(ValidationError) as error:
        a_point(**changes)

    assert field in str(error.value)


def test_accuracy_basis_selects_value_or_lower_bound():
    known, bare = Accuracy(value=0.9, low=0.85, high=0.94, samples=200, source="Measured"), Accuracy(value=0.9)

    assert (known.on("Expected"), known.on("LowerBound")) == (0.9, 0.85)
    assert (bare.on("Expected"), bare.on("LowerBound")) == (0.9, 0.9)


def test_task_accuracy_overrides_overall_accuracy():
    point = a_point(
        accuracyEvidence={"source": "Measured", "low": 0.88},
        accuracyByTask={"crops": {"value": 0.7, "low": 0.6, "samples": 100, "source": "Measured"}},
    )

    assert point.measured_accuracy("crops") == Accuracy(value=0.7, low=0.6, samples=100, source="Measured")
    assert (
        point.measured_accuracy("faces")
        == point.measured_accuracy()
        == Accuracy(value=0.9, low=0.88, source="Measured")
    )
    assert point.accuracies_by_task("LowerBound") == {"crops": 0.6}


def test_lower_bound_basis_applies_to_task_escalations():
    tasks = {
        "crops": TaskEscalation(confidence_below=0.6, share=0.3, accuracy=0.94, accuracy_low=0.91),
        "pets": TaskEscalation(confidence_below=0, share=0, accuracy=0.7),
    }
    escalation = Escalation(to="more", confidence_below=0.4, share=0.15, accuracy=0.82, accuracy_low=0.8, by_task=tasks)

    assert [escalation.planned(basis).accuracy for basis in ("Expected", "LowerBound")] == [0.82, 0.8]
    assert escalation.planned("LowerBound").by_task["crops"].accuracy == 0.91
    assert escalation.planned("LowerBound").by_task["pets"].accuracy == 0.7, "where no bound was measured"
    assert escalation.planned("Expected").by_task["crops"].accuracy == 0.94


def test_variant_evidence_applies_to_its_only_point():
    evidence, tasks = {"source": "Measured", "low": 0.8}, {"crops": {"value": 0.7}}
    variant = Variant.model_validate(a_variant(accuracyEvidence=evidence, accuracyByTask=tasks))

    assert variant.point("default").measured_accuracy().low == 0.8
    assert variant.point("default").measured_accuracy("crops").value == 0.7
    with pytest.raises(ValidationError, match="accuracyByTask"):
        Variant.model_validate(a_variant(accuracyByTask=tasks, operatingPoints=[{"accuracy": 0.9}]))


def test_batches_include_point_and_required_inputs():
    inputs = [
        StageInput.model_validate({"name": name, "from": f"request.inputs.{name}", "optional": name != "text"})
        for name in ("text", "image", "sound")
    ]

    assert a_point(modalities=["image"]).batch_inputs(inputs) == frozenset({"text", "image"})
    assert a_point().batch_inputs(inputs) is None


def test_unknown_modality_is_rejected():
    points = [{"name": "less", "modalities": ["z"], "accuracy": 0.5}]

    with pytest.raises(ValidationError, match="operating point less of variant small reads 'z', which is not one of"):
        a_pipeline([a_stage(variants=[a_variant(operatingPoints=points)])])


def test_empty_fields_are_omitted():
    written = a_point().model_dump(mode="json", by_alias=True, exclude_none=True)

    assert written == {"name": "some", "modalities": [], "accuracy": 0.9}


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
    assert measured_accuracy(3, 4) == found.replace(mean_confidence=None, samples_digest=None)


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

    accuracies = np.array([0.9, 0.85, 0.8])
    assert [*accuracy_values(stage, Objective(), accuracies)] == [0.9, 0.85, 0.8]
    ranked = accuracy_values(stage, Objective(accuracy_metric="NormalizedRanks"), accuracies)
    assert ranked == pytest.approx([1.0, 0.5, 0.0])
