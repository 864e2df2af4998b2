"""The finer twin: begun from what the small one learned, measured at its points, and merging pays."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import interpolate

from trimtab_model_servers.model import load_model
from trimtab_model_servers.transformer.checkpoints import load
from trimtab_model_servers.transformer.merge_schedule import layer_tokens, multiplications
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.model_spec import model_spec
from trimtab_training.vit_tasks import train, train_finer_patches
from trimtab_training.vit_tasks.datasets import TASKS, Images
from trimtab_training.vit_tasks.train_loops import Training

FOLDER = Path(__file__).parents[3] / "pipelines" / "vit-tasks"
MEASURED = json.loads((FOLDER / train_finer_patches.ACCURACY).read_text())["points"]
ROWS = 48


def the_variant():
    stage = load_pipeline(FOLDER).spec.stages[0]
    return stage, next(variant for variant in stage.variants if variant.name == train_finer_patches.VARIANT)


def test_a_patch_half_as_wide_is_read_as_the_same_patch_enlarged():
    small = load(FOLDER / train.WEIGHTS)
    twin = train_finer_patches.halve_patches(small)
    images = torch.randn(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    large = interpolate(images, scale_factor=2, mode="nearest")

    read = twin.patch_embed["proj"](images)

    assert torch.allclose(read, small.transformer.patch_embed["proj"](large), atol=1e-4)
    assert twin.pos_embed.shape[1] == 1 + twin.shape.patches == 257


def test_the_pipeline_says_of_every_point_and_task_what_was_measured():
    points = the_variant()[1].operating_points

    assert [point.name for point in points] == [point.name for point in train_finer_patches.POINTS]
    for point, served in zip(points, train_finer_patches.POINTS, strict=True):
        whole = MEASURED[point.name]

        assert (point.merging, point.prompts) == (served.merging, served.prompts)
        assert (point.measured_accuracy().value, point.measured_accuracy().samples) == (
            whole["all"]["value"],
            whole["all"]["n"],
        )
        assert {task: found.value for task, found in point.accuracy_by_task.items()} == {
            task: whole[task]["value"] for task in TASKS
        }


@pytest.mark.parametrize("name", ["full", "merge-32", "merge-48-prompts"])
def test_it_answers_as_rightly_as_measured(name):
    stage, variant = the_variant()
    model = load_model(model_spec(load_pipeline(FOLDER), FOLDER, stage, variant, 1.0))
    images = TASKS["crops"]("held-out", ROWS, 2)
    inputs = {"image": images.pixels, "task": torch.zeros(ROWS, dtype=torch.int64)}
    point = model.spec.point(name)
    assert point is not None
    with torch.inference_mode():
        told = model.network.infer(inputs, point)["label"]
    share, expected = float((told == images.labels).double().mean()), MEASURED[name]["crops"]["value"]

    assert abs(share - expected) < 4 * (expected * (1 - expected) / ROWS) ** 0.5


def test_merging_saves_more_than_half_of_the_multiplications_and_costs_accuracy_at_last():
    depth, width, inner = train.SHAPE.depth, train.SHAPE.width, train.SHAPE.inner
    costs = [
        multiplications(layer_tokens(256, depth, point.merging.schedule if point.merging else ()), width, inner)
        for point in train_finer_patches.POINTS
    ]

    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < 0.4 * costs[0]
    assert MEASURED["full"]["crops"]["value"] > MEASURED[train_finer_patches.POINTS[-1].name]["crops"]["value"]


def test_training_with_merging_wins_back_half_of_what_it_cost_with_prompts_and_without():
    for merged, prompted in zip(train_finer_patches.STRONGEST, train_finer_patches.PROMPTED, strict=True):
        names = ("full", f"{merged.name}-plain-head", merged.name, prompted.name)
        full, bare, alone, with_prompts = (MEASURED[name]["all"]["value"] for name in names)

        assert alone - bare >= 0.5 * (full - bare) > 0
        assert with_prompts - bare >= 0.5 * (full - bare)


def test_it_learns_on_from_what_the_small_one_knows(monkeypatch):
    labels = torch.arange(8) % 2
    pixels = (labels[:, None, None, None] * 100 + torch.randint(0, 50, (8, 1, 32, 32))).to(torch.uint8)
    monkeypatch.setattr(train_finer_patches, "_images", lambda *_: Images(pixels, labels))
    losses: list[float] = []
    twin = train_finer_patches.trained(load(FOLDER / train.WEIGHTS), Training(2, 4, 1e-4, seed=1), losses.append)
    stored = train_finer_patches.with_heads(twin)

    assert len(losses) == 2
    assert twin.transformer.shape.patch == train_finer_patches.PATCH_PX
    assert set(stored.heads["plain"]) == set(TASKS)

    told: list[str] = []
    more = train_finer_patches.with_heads_for_merging(stored, told.append)

    assert list(more.heads) == ["plain", "merge-40", "merge-48"]
    assert len(told) == 2 * len(TASKS)
    assert not torch.equal(more.heads["merge-48"]["crops"].weight, stored.heads["plain"]["crops"].weight)
