"""Shipped weights: every modality contributes, more modalities are no worse, and confidences are calibrated."""

from pathlib import Path

import pytest

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.digits_av import SUBSETS, family, subset_name
from trimtab_model_servers.families.digits_av.base import strict_pairs
from trimtab_pipelines.documents import load_pipeline
from trimtab_training.confidence_fitting import calibration_error
from trimtab_training.digits_av.dataset import ItemSource
from trimtab_training.digits_av.evaluate import ScoredItems
from trimtab_training.digits_av.report import MeasuredPipeline

FOLDER = Path(__file__).parents[3] / "pipelines" / "digits-av"
RANKING_SLACK = 0.005
CALIBRATION_BOUND = 0.03
MAX_WEIGHT_BYTES = 4 * 2**20
ITEMS = 400


@pytest.fixture(scope="module")
def measured():
    return MeasuredPipeline.model_validate_json((FOLDER / "measured.json").read_text())


@pytest.fixture(scope="module")
def items():
    return ItemSource("held-out", seed=77).items(0, ITEMS)


@pytest.mark.parametrize("variant", family.VARIANTS)
def test_every_modality_contributes(variant, items, measured):
    """Each subset is above chance, larger ones are no worse, and predictions of two subsets differ."""
    network = family.load(FOLDER / "weights" / f"{variant}.safetensors")
    scored = ScoredItems.of(network, items)
    samples = scored.calibrated({subset: network.calibration(subset) for subset in SUBSETS})
    answers = {subset: scored.logits[subset].argmax(dim=1) for subset in SUBSETS}
    stated = measured.variant(variant).on["synthesised"]
    for subset in SUBSETS:
        share = float(samples[subset].right.mean())
        assert share > 0.3, f"{subset_name(subset)}: accuracy {share:.2f}, chance is 0.10"
        assert share == pytest.approx(stated.point(subset_name(subset)).accuracy.value, abs=0.07)
        assert calibration_error(samples[subset].confidence, samples[subset].right, bins=5) < 0.12
    for fewer, more in strict_pairs():
        assert samples[more].right.mean() > samples[fewer].right.mean() - 0.03
        assert (answers[fewer] != answers[more]).float().mean() > 0.02


@pytest.mark.parametrize("variant", family.VARIANTS)
def test_more_modalities_are_no_less_accurate(variant, measured):
    for on in measured.variant(variant).on.values():
        accuracy = {point.point: point.accuracy.value for point in on.points}
        for fewer, more in strict_pairs():
            assert accuracy[subset_name(more)] >= accuracy[subset_name(fewer)] - RANKING_SLACK


@pytest.mark.parametrize("variant", family.VARIANTS)
def test_confidence_is_calibrated(variant, measured):
    for point in measured.variant(variant).primary_results.points:
        assert point.calibration_error <= CALIBRATION_BOUND, point.point


def test_pipeline_states_the_measured_accuracies(measured):
    for variant in load_pipeline(FOLDER).spec.stages[0].variants:
        known = measured.variant(variant.name)
        assert variant.accuracy == known.primary_results.point("all").accuracy.value
        for point in variant.operating_points:
            own = known.primary_results.point(point.name).accuracy
            evidence = point.measured_accuracy()
            assert evidence == own
            assert point.accuracy_by_task == {kind: on.point(point.name).accuracy for kind, on in known.on.items()}
            assert own.mean_confidence is not None
            assert (
                abs(own.mean_confidence - own.value) <= known.primary_results.point(point.name).calibration_error + 1e-3
            )
            assert point.escalations == known.primary_results.escalations.get(point.name, ())


@pytest.mark.parametrize("variant", family.VARIANTS)
def test_weights_list_their_training_speakers(variant):
    assert family.speakers_of(FOLDER / "weights" / f"{variant}.safetensors") == (
        "george",
        "jackson",
        "lucas",
        "nicolas",
    )


def test_weights_without_speakers_are_rejected(tmp_path):
    family.save(family.build_network(family.VARIANTS["late"], seed=0), tmp_path / "old.safetensors")
    with pytest.raises(ModelError, match="lacks the training speakers"):
        family.speakers_of(tmp_path / "old.safetensors")


def test_weights_are_small_and_include_their_licence():
    assert sum(path.stat().st_size for path in (FOLDER / "weights").glob("*.safetensors")) < MAX_WEIGHT_BYTES
    licence = (FOLDER / "weights" / "LICENSE.md").read_text()
    assert "Free Spoken Digit Dataset" in licence
    assert "Attribution-ShareAlike 4.0" in licence
