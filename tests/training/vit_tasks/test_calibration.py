"""Confidence calibrated by temperatures, and escalation of rows of a token-merging point."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from trimtab_model_servers.server.hosted_model import load_model
from trimtab_model_servers.transformer.checkpoints import load, save, store_temperatures
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.model_spec import model_spec
from trimtab_training.vit_tasks import calibration, train, train_finer_patches
from trimtab_training.vit_tasks.datasets import TASKS
from trimtab_training.vit_tasks.evaluate import FULL, ScoredImages, merging

FOLDER = Path(__file__).parents[3] / "pipelines" / "vit-tasks"
FILES = {
    "vit-small": ("accuracy.json", train.WEIGHTS),
    train_finer_patches.VARIANT: (train_finer_patches.ACCURACY, train_finer_patches.WEIGHTS),
}
ROWS = 2000
MERGED = merging(8)
COUNTS = (1000, 1000, 1000, 80)
"""Held-out images by task."""


def scored(seed: int, *, lost: float, sharpness: float) -> ScoredImages:
    """Ten classes with logits scaled by `sharpness`; a share of the correct ones is swapped."""
    random = torch.Generator().manual_seed(seed)
    true = torch.randn(ROWS, 10, generator=random) * 1.5
    labels = torch.multinomial(true.softmax(dim=1), 1, generator=random).view(-1)
    doubtful = true.softmax(dim=1).amax(dim=1) < true.softmax(dim=1).amax(dim=1).median()
    swapped = doubtful & (torch.rand(ROWS, generator=random) < lost)
    return ScoredImages((true.where(~swapped[:, None], true.roll(1, dims=1))) * sharpness, labels)


def both() -> dict[str, dict[str, ScoredImages]]:
    return {
        FULL.name: {"one": scored(1, lost=0.0, sharpness=3.0), "other": scored(2, lost=0.0, sharpness=0.4)},
        MERGED.name: {"one": scored(1, lost=0.5, sharpness=3.0), "other": scored(2, lost=0.5, sharpness=0.4)},
    }


def test_each_point_and_task_gets_its_own_temperature() -> None:
    temperatures = calibration.fit_temperatures(both(), [FULL])

    assert temperatures["plain"]["one"] == pytest.approx(3.0, rel=0.1)
    assert temperatures["plain"]["other"] == pytest.approx(0.4, rel=0.1)
    report = calibration.confidence_report(both(), [FULL])["full"]
    assert report["error"] < 0.03
    assert max(abs(bias) for bias in report["bias"].values()) < 0.03


def test_reported_confidence_is_cross_fitted() -> None:
    """A temperature fitted to an image's own half would change with its labels."""
    images = scored(3, lost=0.0, sharpness=2.0)
    (first, second), _ = calibration.random_halves(ROWS)
    before = calibration.confidence_sample({"one": images}).confidence
    labels = images.labels.clone()
    labels[first[:300]] = (labels[first[:300]] + 5) % 10
    after = calibration.confidence_sample({"one": ScoredImages(images.logits, labels)}).confidence

    assert sorted([*first.tolist(), *second.tolist()]) == list(range(ROWS))
    assert (after[first] == before[first]).all()
    assert (after[second] != before[second]).any()


def test_escalations_of_merging_points_are_written(tmp_path: Path) -> None:
    escalations = calibration.escalations(both(), [FULL, MERGED])

    assert not escalations[FULL.name]
    assert {escalation.to for escalation in escalations[MERGED.name]} == {FULL.name}
    assert min(escalation.share for escalation in escalations[MERGED.name]) < 0.6
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        "spec:\n  stages:\n  - name: classify\n    variants:\n    - name: vit\n      operatingPoints:\n"
        "      - name: full\n        accuracy: 0.9\n      - name: merge-8\n        accuracy: 0.8\n"
    )
    calibration.write_escalations(file, "vit", escalations)
    assert file.read_text().count("{to: full, confidenceBelow: ") == len(escalations[MERGED.name])


def test_storing_temperatures_changes_nothing_else(tmp_path: Path) -> None:
    before, path = load(FOLDER / train.WEIGHTS), tmp_path / "weights.safetensors"
    save(before, path, {"seed": "3"})
    store_temperatures(path, {"plain": {"crops": 1.5}})
    after = load(path)

    assert after.temperatures == {"plain": {"crops": 1.5}}
    assert after.tasks == before.tasks
    for name, tensor in before.transformer.state_dict().items():
        assert torch.equal(tensor, after.transformer.state_dict()[name])


@pytest.mark.parametrize("variant", FILES)
def test_shipped_confidences_are_measured_and_calibrated(variant: str) -> None:
    file, weights = FILES[variant]
    report = json.loads((FOLDER / file).read_text())["confidence"]
    points = load_pipeline(FOLDER).spec.stages[0].variant(variant).operating_points

    assert list(report) == [point.name for point in points]
    for point in points:
        means = {task: one.value + report[point.name]["bias"][task] for task, one in point.accuracy_by_task.items()}
        assert {task: one.mean_confidence for task, one in point.accuracy_by_task.items()} == pytest.approx(means)
        assert point.measured_accuracy().mean_confidence is None, "the mix of tasks is unknown"
    assert all(abs(bias) < 0.04 for point in report.values() for bias in point["bias"].values())
    assert all(set(by_task) == set(TASKS) for by_task in load(FOLDER / weights).temperatures.values())
    assert len(load(FOLDER / weights).temperatures) == len(points)


def test_shipped_pipeline_escalates_strong_merging() -> None:
    pipeline = load_pipeline(FOLDER)
    stage = pipeline.spec.stages[0]
    variant = stage.variant(train_finer_patches.VARIANT)
    offered = {point.name: point.escalations for point in variant.operating_points if point.escalations}

    assert set(offered) == {"merge-40-prompts", "merge-48-prompts"}
    for name, escalations in offered.items():
        for escalation in escalations:
            assert escalation.samples == 3080
            assert escalation.accuracy_low is not None
            assert escalation.accuracy_low < escalation.accuracy
            assert set(escalation.by_task) == set(TASKS)
            shares = {task: one.share for task, one in escalation.by_task.items()}
            assert escalation.share == pytest.approx(
                np.average([shares[task] for task in TASKS], weights=COUNTS), abs=2e-4
            )
            assert variant.point(name).accuracy + 0.0049 < escalation.accuracy
    model = load_model(model_spec(pipeline, FOLDER, stage, variant, 1.0))
    images = TASKS["turned"]("held-out", 256, 2)
    inputs = {"image": images.pixels, "task": torch.full((256,), list(TASKS).index("turned"))}
    point = model.spec.point("merge-24")
    assert point is not None
    with torch.inference_mode():
        answer = model.network.infer(inputs, point)
    correct = (answer["label"] == images.labels).double().mean()
    assert abs(float(answer["confidence"].mean() - correct)) < 3 * (0.36 * 0.64 / 256) ** 0.5
