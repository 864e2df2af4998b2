"""Training: it learns, it measures what it says it measures, and writes into the pipeline what it found."""

import numpy as np
import pytest
import torch

from tests.training.digits_av.test_dataset import a_recording_file
from trimtab_model_servers.families.digits_av import SUBSETS, subset_name, variants
from trimtab_model_servers.families.digits_av.calibration import Calibration, apply_calibration, identity_calibration
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.training_report import MeasuredPipeline
from trimtab_training.confidence_fitting import best_temperature, calibration_error, fitted_curve
from trimtab_training.digits_av import train
from trimtab_training.digits_av.dataset import ItemSource
from trimtab_training.digits_av.evaluate import Scored, measurement_document
from trimtab_training.digits_av.recorded_digits import held_out_speakers, load_recordings
from trimtab_training.digits_av.train_loops import fit
from trimtab_training.optimizer import Schedule

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
def test_a_network_learns_from_every_sense(variant, items):
    network = variants.build(variants.VARIANTS[variant], seed=1)
    losses: list[float] = []
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters() if "weight" in name}
    fit(network, items, Schedule(steps=30, batch=16, peak_rate=4e-3, seed=1), losses.append)

    assert len(losses) == 30
    assert np.mean(losses[-8:]) < np.mean(losses[:8])
    assert not [n for n, p in network.named_parameters() if n in before and torch.equal(p, before[n])]


def test_a_temperature_undoes_being_too_sure():
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 10, generator=random) * 2
    digits = torch.multinomial(logits.softmax(dim=1), 1, generator=random)[:, 0]

    assert best_temperature(logits * 2.0, digits) == pytest.approx(2.0, rel=0.1)


def test_a_curve_mends_what_no_temperature_does_and_keeps_the_order():
    """A kind of rows that knows less than it says, and one that knows more, as hints and names are."""
    random = np.random.default_rng(3)
    told = np.where(random.random(8000) < 0.5, random.uniform(0.2, 0.5, 8000), random.uniform(0.5, 0.99, 8000))
    right = random.random(8000) < np.where(told < 0.5, told / 2, 0.8 + told / 5)
    knots = fitted_curve(told[:4000], right[:4000])
    mended = apply_calibration(torch.from_numpy(knots), torch.from_numpy(told[4000:].astype(np.float32))).numpy()

    assert (np.diff(knots) >= 0).all()
    assert calibration_error(told[4000:], right[4000:]) > 0.1
    assert calibration_error(mended, right[4000:]) < 0.03
    assert (np.diff(mended[np.argsort(told[4000:])]) >= -1e-6).all()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_curve_of_what_is_never_or_always_right_stays_a_curve(share):
    knots = torch.from_numpy(fitted_curve(np.linspace(0.1, 0.9, 50), np.full(50, share > 0)))
    found = apply_calibration(knots, torch.tensor([0.0, 0.3, 1.0]))

    assert found.tolist() == pytest.approx([0.0, 0.3, 1.0], abs=1e-3)


def test_calibration_error_is_the_mean_gap():
    confidence = np.array([0.9] * 10 + [0.5] * 10)
    right = np.array([True] * 8 + [False] * 2 + [True] * 5 + [False] * 5)

    assert calibration_error(confidence, right) == pytest.approx(0.05)
    assert calibration_error(np.array([1.0]), np.array([True])) == 0.0


def test_what_is_measured_is_told_point_by_point(items):
    scored = Scored.of(variants.for_serving(variants.build(variants.VARIANTS["late"], seed=1)), items)
    told = measurement_document("what", scored.seen(dict.fromkeys(SUBSETS, Calibration(1.0, identity_calibration()))))

    assert [point.point for point in told.points] == [subset_name(subset) for subset in SUBSETS]
    assert told.samples == 120
    for point, subset in zip(told.points, SUBSETS, strict=True):
        right = int((scored.logits[subset].argmax(dim=1) == scored.digits).sum())
        assert point.accuracy.value == pytest.approx(right / 120, abs=1e-4)
    curves = {(curve.first, curve.then): curve for curve in told.curves}
    assert len(curves) == 12
    assert curves["audio", "all"].accuracies[0] == told.point("audio").accuracy.value
    assert curves["audio", "all"].accuracies[-1] == told.point("all").accuracy.value
    assert told.worst.accuracy.value == min(point.accuracy.value for point in told.points)


def test_training_with_recordings_judges_each_speaker_and_writes_the_pipeline(tmp_path, monkeypatch):
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

    found = MeasuredPipeline.model_validate_json((tmp_path / "measured.json").read_text()).variant("late")
    assert found.primary == "recorded"
    assert {kind: on.samples for kind, on in found.on.items()} == {"synthesised": 60, "recorded": 60}
    assert "each speaker judged by weights trained on the others" in found.primary_results.description
    assert "# a comment that stays" in manifest.read_text()
    late, early = load_pipeline(manifest).spec.stages[0].variants
    assert early.operating_points[0].accuracy == 0.5
    assert {point.name for point in late.operating_points} == {subset_name(subset) for subset in SUBSETS}
    for point in late.operating_points:
        own = found.primary_results.point(point.name)
        assert point.accuracy == own.accuracy.value
        assert {task: known.value for task, known in point.accuracy_by_task.items()} == {
            kind: on.point(point.name).accuracy.value for kind, on in found.on.items()
        }
        assert point.escalations == found.primary_results.escalations.get(point.name, ())
    weights = tmp_path / "weights" / "late.safetensors"
    variants.load(weights)
    assert variants.speakers_of(weights) == ("ann", "bob")
    assert held_out_speakers(load_recordings(data), variants.speakers_of(weights)) == ("cid",)
    assert "(fsdd_dev.npz) of ann, bob, cid" in found.primary_results.description

    assert train.main(["-o", str(tmp_path), "--only", "early"]) == 0
    both = MeasuredPipeline.model_validate_json((tmp_path / "measured.json").read_text())
    assert [variant.name for variant in both.variants] == ["late", "early"]
    assert both.variant("early").primary == "synthesised"
    assert variants.speakers_of(tmp_path / "weights" / "early.safetensors") == ()


def test_nobody_learns_from_one_speaker_alone(tmp_path, capsys):
    a_recording_file(tmp_path, ["ann"])
    with pytest.raises(SystemExit):
        train.main(["-o", str(tmp_path), "--recordings", str(tmp_path)])
    assert "recordings of ann alone; give those of two speakers" in " ".join(capsys.readouterr().err.split())
