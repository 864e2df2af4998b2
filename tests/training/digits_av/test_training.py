"""Training of the digits-av networks: losses, calibration, reports and the pipeline file."""

import numpy as np
import pytest
import torch

from tests.training.digits_av.test_dataset import a_recording_file
from trimtab_model_servers.families.digits_av import SUBSETS, family, subset_name
from trimtab_model_servers.families.digits_av.base import Calibration, apply_calibration, identity_calibration
from trimtab_pipelines.documents import load_pipeline
from trimtab_training.confidence_fitting import best_temperature, calibration_error, fitted_curve
from trimtab_training.digits_av import train
from trimtab_training.digits_av.dataset import ItemSource, held_out_speakers, load_recordings
from trimtab_training.digits_av.evaluate import ScoredItems, measurement_document
from trimtab_training.digits_av.report import MeasuredPipeline
from trimtab_training.digits_av.train import fit
from trimtab_training.trainer import Schedule

MANIFEST = """\
apiVersion: trimtab.dev/v1alpha1
kind: InferencePipeline
metadata: {name: x}
spec:
  inputs:
  - {name: audio, datatype: INT16, shape: [6400], optional: true}
  - {name: video, datatype: UINT8, shape: [4, 24, 24], optional: true}
  - {name: text, datatype: UINT8, shape: [6], optional: true}
  outputs:
  - {name: digit, from: name.outputs.digit}
  slo: {latency: 300ms}
  budget: {cores: "2"}
  stages:
  - name: name
    inputs:
    - {name: audio, from: request.inputs.audio, optional: true}
    - {name: video, from: request.inputs.video, optional: true}
    - {name: text, from: request.inputs.text, optional: true}
    outputs:
    - {name: digit, datatype: INT64}
    - {name: confidence, datatype: FP32}
    confidence: confidence
    variants:
    - name: late  # a comment that stays
      family: digits-av/late
      storageUri: weights/late.safetensors
      accuracy: 0.5
      operatingPoints:
      - {name: all, accuracy: 0.5}
      - {name: audio, modalities: [audio], accuracy: 0.5}
      - {name: video, modalities: [video], accuracy: 0.5}
      - {name: text, modalities: [text], accuracy: 0.5}
      - {name: audio-video, modalities: [audio, video], accuracy: 0.5}
      - {name: audio-text, modalities: [audio, text], accuracy: 0.5}
      - {name: video-text, modalities: [video, text], accuracy: 0.5}
      resources: {cpu: "1"}
    - name: early
      family: digits-av/early
      storageUri: weights/early.safetensors
      accuracy: 0.5
      operatingPoints:
      - {name: all, accuracy: 0.5}
"""


@pytest.fixture(scope="module")
def items():
    return ItemSource("train", seed=31).items(0, 120)


@pytest.mark.parametrize("variant", ["late", "early"])
def test_training_changes_every_weight_and_lowers_the_loss(variant, items):
    network = family.build_network(family.VARIANTS[variant], seed=1)
    losses: list[float] = []
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters() if "weight" in name}
    fit(network, items, Schedule(steps=30, batch=16, peak_rate=4e-3, seed=1), losses.append)

    assert len(losses) == 30
    assert np.mean(losses[-8:]) < np.mean(losses[:8])
    assert not [n for n, p in network.named_parameters() if n in before and torch.equal(p, before[n])]


def test_best_temperature_corrects_overconfidence():
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 10, generator=random) * 2
    digits = torch.multinomial(logits.softmax(dim=1), 1, generator=random)[:, 0]

    assert best_temperature(logits * 2.0, digits) == pytest.approx(2.0, rel=0.1)


def test_fitted_curve_corrects_groups_and_keeps_order():
    """One group of rows is overconfident, the other underconfident, as with hints and names."""
    random = np.random.default_rng(3)
    confidence = np.where(random.random(8000) < 0.5, random.uniform(0.2, 0.5, 8000), random.uniform(0.5, 0.99, 8000))
    right = random.random(8000) < np.where(confidence < 0.5, confidence / 2, 0.8 + confidence / 5)
    knots = fitted_curve(confidence[:4000], right[:4000])
    calibrated = apply_calibration(
        torch.from_numpy(knots), torch.from_numpy(confidence[4000:].astype(np.float32))
    ).numpy()

    assert (np.diff(knots) >= 0).all()
    assert calibration_error(confidence[4000:], right[4000:]) > 0.1
    assert calibration_error(calibrated, right[4000:]) < 0.03
    assert (np.diff(calibrated[np.argsort(confidence[4000:])]) >= -1e-6).all()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_fitted_curve_of_constant_accuracy_is_the_identity(share):
    knots = torch.from_numpy(fitted_curve(np.linspace(0.1, 0.9, 50), np.full(50, share > 0)))
    calibrated = apply_calibration(knots, torch.tensor([0.0, 0.3, 1.0]))

    assert calibrated.tolist() == pytest.approx([0.0, 0.3, 1.0], abs=1e-3)


def test_calibration_error_is_the_mean_gap():
    confidence = np.array([0.9] * 10 + [0.5] * 10)
    right = np.array([True] * 8 + [False] * 2 + [True] * 5 + [False] * 5)

    assert calibration_error(confidence, right) == pytest.approx(0.05)
    assert calibration_error(np.array([1.0]), np.array([True])) == 0.0


def test_measurement_document_lists_every_point(items):
    scored = ScoredItems.of(family.prepare_for_serving(family.build_network(family.VARIANTS["late"], seed=1)), items)
    report = measurement_document(
        "what", scored.calibrated(dict.fromkeys(SUBSETS, Calibration(1.0, identity_calibration())))
    )

    assert [point.point for point in report.points] == [subset_name(subset) for subset in SUBSETS]
    assert report.samples == 120
    for point, subset in zip(report.points, SUBSETS, strict=True):
        right = int((scored.logits[subset].argmax(dim=1) == scored.digits).sum())
        assert point.accuracy.value == pytest.approx(right / 120, abs=1e-4)


def test_training_with_recordings_updates_the_pipeline(tmp_path, monkeypatch):
    few = {"TRAINING_ITEMS": 60, "CALIBRATION_ITEMS": 40, "HELD_OUT_ITEMS": 60}
    for name, value in few.items():
        monkeypatch.setattr(train, name, value)
    quick = Schedule(steps=3, batch=8, peak_rate=1e-3, seed=1)
    monkeypatch.setattr(train, "SCHEDULES", {"late": quick, "early": quick})
    monkeypatch.setattr(train, "TUNING_STEPS", {"late": 2, "early": 2})
    manifest = tmp_path / "pipeline.yaml"
    manifest.write_text(MANIFEST)
    data = tmp_path / "data"
    data.mkdir()
    a_recording_file(data, ["ann", "bob", "cid"])

    assert train.main(["-o", str(tmp_path), "--recordings", str(data), "--only", "late"]) == 0

    report = MeasuredPipeline.model_validate_json((tmp_path / "measured.json").read_text()).variant("late")
    assert report.primary == "recorded"
    assert {kind: on.samples for kind, on in report.on.items()} == {"synthesised": 60, "recorded": 60}
    assert "each speaker measured with weights trained on the others" in report.primary_results.description
    assert "# a comment that stays" in manifest.read_text()
    late, early = load_pipeline(manifest).spec.stages[0].variants
    assert early.operating_points[0].accuracy == 0.5
    assert {point.name for point in late.operating_points} == {subset_name(subset) for subset in SUBSETS}
    for point in late.operating_points:
        own = report.primary_results.point(point.name)
        assert point.accuracy == own.accuracy.value
        assert {task: known.value for task, known in point.accuracy_by_task.items()} == {
            kind: on.point(point.name).accuracy.value for kind, on in report.on.items()
        }
        assert point.escalations == report.primary_results.escalations.get(point.name, ())
    weights = tmp_path / "weights" / "late.safetensors"
    family.load(weights)
    assert family.speakers_of(weights) == ("ann", "bob")
    assert held_out_speakers(load_recordings(data), family.speakers_of(weights)) == ("cid",)
    assert "(fsdd_dev.npz) of ann, bob, cid" in report.primary_results.description

    assert train.main(["-o", str(tmp_path), "--only", "early"]) == 0
    both = MeasuredPipeline.model_validate_json((tmp_path / "measured.json").read_text())
    assert [variant.name for variant in both.variants] == ["late", "early"]
    assert both.variant("early").primary == "synthesised"
    assert family.speakers_of(tmp_path / "weights" / "early.safetensors") == ()


def test_recordings_of_one_speaker_are_rejected(tmp_path, capsys):
    a_recording_file(tmp_path, ["ann"])
    with pytest.raises(SystemExit):
        train.main(["-o", str(tmp_path), "--recordings", str(tmp_path)])
    assert "at least two are needed" in " ".join(capsys.readouterr().err.split())
