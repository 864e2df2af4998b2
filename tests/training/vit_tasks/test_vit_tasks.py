"""The small vision transformer: what its pipeline says is what was measured, and it answers as it was measured."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from trimtab_model_servers.model import load_model
from trimtab_model_servers.transformer.transformer import ForwardPlan, VisionTransformer
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.model_spec import model_spec
from trimtab_training.prompt_tuning import features_of
from trimtab_training.vit_tasks import datasets, train
from trimtab_training.vit_tasks.datasets import CLASSES, PHOTOS, TASKS, Images
from trimtab_training.vit_tasks.evaluate import at_points, hits_of, report
from trimtab_training.vit_tasks.labelled_samples import HeldOut
from trimtab_training.vit_tasks.operating_points import COMPARED, FULL, POINTS
from trimtab_training.vit_tasks.train import SHAPE, with_heads
from trimtab_training.vit_tasks.train_loops import Training, fit_head, fit_transformer, initialise

FOLDER = Path(__file__).parents[3] / "pipelines" / "vit-tasks"
MEASURED = json.loads((FOLDER / "accuracy.json").read_text())["points"]
ROWS = 128


def the_variant():
    stage = load_pipeline(FOLDER).spec.stages[0]
    return stage, stage.variants[0]


@pytest.fixture(scope="module")
def model():
    stage, variant = the_variant()
    return load_model(model_spec(load_pipeline(FOLDER), FOLDER, stage, variant, 1.0))


def test_the_pipeline_says_of_every_point_and_task_what_was_measured():
    points = the_variant()[1].operating_points

    assert [point.name for point in points] == [point.name for point in POINTS]
    for point, served in zip(points, POINTS, strict=True):
        whole = MEASURED[point.name]

        assert point.merging == served.merging
        assert (point.measured_accuracy().value, point.measured_accuracy().samples) == (
            whole["all"]["value"],
            whole["all"]["n"],
        )
        assert {task: found.value for task, found in point.accuracy_by_task.items()} == {
            task: whole[task]["value"] for task in TASKS
        }


def test_merging_costs_little_at_first_and_then_much():
    crops = [MEASURED[point.name]["crops"]["value"] for point in POINTS]

    assert crops[0] - crops[2] < 0.02
    assert crops[2] - crops[4] > 0.05


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_tasks_mixed_in_a_batch_are_answered_as_rightly_as_measured(model, point):
    drawn = {task: draw("held-out", ROWS, 2) for task, draw in TASKS.items() if task in {"crops", "digits"}}
    pixels = torch.cat([images.pixels for images in drawn.values()])
    labels = torch.cat([images.labels for images in drawn.values()])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    tasks = torch.arange(len(drawn)).repeat_interleave(ROWS)
    served = model.spec.point(point.name)
    with torch.inference_mode():
        told = model.network.infer({"image": pixels[order], "task": tasks[order]}, served)["label"]
    right = (told == labels[order]).double()
    for number, task in enumerate(drawn):
        share, expected = float(right[tasks[order] == number].mean()), MEASURED[point.name][task]["value"]

        assert abs(share - expected) < 4 * (expected * (1 - expected) / ROWS) ** 0.5


def test_tasks_have_the_names_and_numbers_of_the_weights(model):
    assert model.facts()["tasks"] == ",".join(TASKS)


@pytest.mark.parametrize("task", TASKS)
def test_images_are_grey_bytes_and_every_label_there_is(task):
    for split in ("train", "held-out"):
        images = TASKS[task](split, 200, 3)

        assert images.pixels.dtype == torch.uint8
        assert images.pixels.shape[1:] == (1, 32, 32)
        assert set(images.labels.tolist()) <= set(range(len(CLASSES[task])))
        assert images.pixels.float().flatten(1).std(dim=1).median() > 5


@pytest.mark.parametrize("task", ["digits", "turned"])
def test_the_first_held_out_digits_are_like_the_others(task):
    """Of each label about as many: by source and label, as they are stored, the first thousand lack some."""
    images = TASKS[task]("held-out", 10_000, 2)
    first, rest = (torch.bincount(labels, minlength=10) / len(labels) for labels in images.labels.split([1000, 1039]))

    assert len(images) == 2039
    assert (first - rest).abs().max() < 0.04


def test_no_training_crop_shows_a_column_that_is_held_out(monkeypatch):
    """On photos that are black where training may look and white elsewhere, every crop is of one colour."""

    def striped(name):
        photo = np.zeros((100, 400), dtype=np.uint8)
        photo[:, 130:200] = photo[:, 330:] = 200
        return photo + (np.indices(photo.shape).sum(0) % 2 * 40).astype(np.uint8)

    monkeypatch.setattr(datasets, "_photo", striped)
    seen, held_out = (
        datasets.crops(split, 64, 4).pixels.float().mean(dim=(1, 2, 3)) for split in ("train", "held-out")
    )

    assert seen.max() < 50
    assert held_out.min() > 190


def test_held_out_samples_come_with_task_and_label():
    samples = HeldOut()
    inputs, truth = samples[0]

    assert inputs["image"].shape == (1, 32, 32)
    assert (int(inputs["task"]), truth) == (0, {"label": 0})
    assert int(samples[len(samples) - 1][0]["task"]) == len(TASKS) - 1


def some_images(count=32):
    """Two kinds of image that differ at a glance: stripes that lie, or stand."""
    random = torch.Generator().manual_seed(5)
    labels = torch.arange(count) % 2
    pixels = torch.randint(0, 60, (count, 1, 32, 32), generator=random)
    pixels[labels == 0, :, ::2] += 150
    pixels[labels == 1, :, :, ::2] += 150
    return Images(pixels.to(torch.uint8), labels)


def test_training_learns_and_heads_learn_on_what_is_frozen():
    images, schedule = some_images(), Training(steps=60, batch=32, peak_rate=4e-3, seed=1)
    transformer = VisionTransformer(SHAPE.model_copy(update={"depth": 2, "width": 32, "inner": 64}))
    initialise(transformer, 1)
    losses: list[float] = []
    own = fit_transformer(transformer, images, 2, schedule, losses.append)
    transformer.eval().requires_grad_(requires_grad=False)
    before = [parameter.clone() for parameter in transformer.parameters()]
    again = fit_head(transformer, images, 2, schedule)

    assert losses[-1] < losses[0] / 2
    assert all(torch.equal(a, b) for a, b in zip(before, transformer.parameters(), strict=True))
    for head in (own, again):
        told = (features_of(transformer, images.pixels, "Image", ForwardPlan()) @ head.weight.T + head.bias).argmax(
            dim=1
        )

        assert (told == images.labels).float().mean() > 0.9


def test_a_report_names_every_point_and_what_one_rule_wins_over_the_other(monkeypatch):
    monkeypatch.setattr(train, "_images", lambda _: some_images())
    transformer = VisionTransformer(SHAPE.model_copy(update={"depth": 1})).eval()
    initialise(transformer, 1)
    head = fit_head(transformer, some_images(), len(PHOTOS), train.HEADS)
    held_out = dict.fromkeys(TASKS, some_images(8))
    stored = with_heads(transformer, head, lambda _: None)
    found = report(hits_of(at_points(stored, [*POINTS, *COMPARED], held_out, lambda _: None)))

    assert found["variants"]["vit-small"]["n"] == 8 * len(TASKS)
    assert list(found["points"]) == [point.name for point in POINTS]
    assert {gain["of"] for gain in found["gains"]} == {
        "merge-8-guided against merge-8",
        "merge-10-guided against merge-10",
    }
    assert found["points"][FULL.name].keys() == {*TASKS, "all"}
