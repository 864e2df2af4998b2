"""The small vision transformer: pipeline, report, data and training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.test_task_training import stripes
from trimtab_model_servers.server.hosted_model import load_model
from trimtab_model_servers.transformer.transformer import ForwardPlan, VisionTransformer
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.model_spec import model_spec
from trimtab_training.task_training import compute_features
from trimtab_training.trainer import Schedule
from trimtab_training.vit_tasks import datasets, train_finer_patches
from trimtab_training.vit_tasks.datasets import CLASSES, TASKS, HeldOut
from trimtab_training.vit_tasks.points import POINTS
from trimtab_training.vit_tasks.train import SHAPE, fit_head, fit_transformer, init_weights

FOLDER = Path(__file__).parents[3] / "pipelines" / "vit-tasks"
SMALL = load_pipeline(FOLDER).spec.stages[0].variants[0]
ROWS = 128


@pytest.fixture(scope="module")
def model():
    pipeline = load_pipeline(FOLDER)
    stage = pipeline.spec.stages[0]
    return load_model(model_spec(pipeline, FOLDER, stage, stage.variants[0], 1.0))


@pytest.mark.parametrize(
    ("variant", "served_points"),
    [("vit-small", POINTS), (train_finer_patches.VARIANT, train_finer_patches.POINTS)],
)
def test_pipeline_states_measured_accuracies_by_task(variant, served_points):
    points: Any = load_pipeline(FOLDER).spec.stages[0].variant(variant).operating_points

    assert [(point.name, point.merging, point.prompts) for point in points] == [
        (point.name, point.merging, point.prompts) for point in served_points
    ]
    for point in points:
        by_task = point.accuracy_by_task
        assert {task: accuracy.samples for task, accuracy in by_task.items()} == {
            **dict.fromkeys(TASKS, 1000),
            "faces": 80,
        }
        correct = sum(accuracy.value * accuracy.samples for accuracy in by_task.values())
        assert point.measured_accuracy().samples == 3080
        assert point.accuracy == pytest.approx(correct / 3080, abs=1e-4)


def test_accuracy_falls_slowly_and_then_fast_with_merging():
    crops = [point.accuracy_by_task["crops"].value for point in SMALL.operating_points]

    assert crops[0] - crops[2] < 0.02
    assert crops[2] - crops[4] > 0.05


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_mixed_tasks_reach_the_measured_accuracy(model, point):
    drawn = {task: draw("held-out", ROWS, 2) for task, draw in TASKS.items() if task in {"crops", "digits"}}
    pixels = torch.cat([images.pixels for images in drawn.values()])
    labels = torch.cat([images.labels for images in drawn.values()])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    tasks = torch.arange(len(drawn)).repeat_interleave(ROWS)
    served = model.spec.point(point.name)
    with torch.inference_mode():
        labels_out = model.network.infer({"image": pixels[order], "task": tasks[order]}, served)["label"]
    correct = (labels_out == labels[order]).double()
    for number, task in enumerate(drawn):
        share, expected = (
            float(correct[tasks[order] == number].mean()),
            SMALL.point(point.name).accuracy_by_task[task].value,
        )

        assert abs(share - expected) < 4 * (expected * (1 - expected) / ROWS) ** 0.5


def test_tasks_of_weights_are_reported(model):
    assert model.facts()["tasks"] == ",".join(TASKS)


@pytest.mark.parametrize("task", TASKS)
def test_images_are_grey_bytes_with_known_labels(task):
    for split in ("train", "held-out"):
        images = TASKS[task](split, 200, 3)

        assert images.pixels.dtype == torch.uint8
        assert images.pixels.shape[1:] == (1, 32, 32)
        assert set(images.labels.tolist()) <= set(range(len(CLASSES[task])))
        assert images.pixels.float().flatten(1).std(dim=1).median() > 5


@pytest.mark.parametrize("task", ["digits", "turned"])
def test_first_held_out_digits_are_a_random_sample(task):
    """The first thousand in the stored order, by source and label, would lack labels."""
    images = TASKS[task]("held-out", 10_000, 2)
    first, rest = (torch.bincount(labels, minlength=10) / len(labels) for labels in images.labels.split([1000, 1039]))

    assert len(images) == 2039
    assert (first - rest).abs().max() < 0.04


def test_training_crops_show_no_held_out_column(monkeypatch):
    """Photos are black in training columns and white in held-out ones."""

    def striped(name):
        photo = np.zeros((100, 400), dtype=np.uint8)
        photo[:, 130:200] = photo[:, 330:] = 200
        return photo + (np.indices(photo.shape).sum(0) % 2 * 40).astype(np.uint8)

    monkeypatch.setattr(datasets, "_photo", striped)
    train_means, held_out_means = (
        datasets.crops(split, 64, 4).pixels.float().mean(dim=(1, 2, 3)) for split in ("train", "held-out")
    )

    assert train_means.max() < 50
    assert held_out_means.min() > 190


def test_held_out_samples_have_task_and_label():
    samples = HeldOut()
    inputs, truth = samples[0]

    assert inputs["image"].shape == (1, 32, 32)
    assert (int(inputs["task"]), truth) == (0, {"label": 0})
    assert int(samples[len(samples) - 1][0]["task"]) == len(TASKS) - 1


def test_training_lowers_loss_and_heads_fit_frozen_features():
    images, schedule = stripes(side=32), Schedule(steps=60, batch=32, peak_rate=4e-3, seed=1)
    transformer = VisionTransformer(SHAPE.replace(depth=2, width=32, inner=64))
    init_weights(transformer, 1)
    losses: list[float] = []
    trained = fit_transformer(transformer, images, 2, schedule, losses.append)
    transformer.eval().requires_grad_(requires_grad=False)
    before = [parameter.clone() for parameter in transformer.parameters()]
    refitted = fit_head(transformer, images, 2, schedule)

    assert losses[-1] < losses[0] / 2
    assert all(torch.equal(a, b) for a, b in zip(before, transformer.parameters(), strict=True))
    for head in (trained, refitted):
        features = compute_features(transformer, images.pixels, "Image", ForwardPlan())
        predictions = (features @ head.weight.T + head.bias).argmax(dim=1)

        assert (predictions == images.labels).float().mean() > 0.9
