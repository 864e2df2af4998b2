"""The transformer with finer patches: initial weights, shipped accuracies and training."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import interpolate
from torch.utils.flop_counter import FlopCounterMode

from tests.training.test_task_training import stripes
from trimtab_model_servers.server.hosted_model import load_model
from trimtab_model_servers.transformer.checkpoints import load
from trimtab_model_servers.transformer.transformer import forward_plan
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.model_spec import model_spec
from trimtab_training.trainer import Schedule
from trimtab_training.vit_tasks import train, train_finer_patches
from trimtab_training.vit_tasks.datasets import TASKS

FOLDER = Path(__file__).parents[3] / "pipelines" / "vit-tasks"
VARIANT = load_pipeline(FOLDER).spec.stages[0].variant(train_finer_patches.VARIANT)
ROWS = 48


def test_halved_patches_embed_enlarged_images_alike():
    small = load(FOLDER / train.WEIGHTS)
    twin = train_finer_patches.halve_patches(small)
    images = torch.randn(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    large = interpolate(images, scale_factor=2, mode="nearest")

    embedded = twin.patch_embed["proj"](images)

    assert torch.allclose(embedded, small.transformer.patch_embed["proj"](large), atol=1e-4)
    assert twin.pos_embed.shape[1] == 1 + twin.shape.patches == 257


@pytest.mark.parametrize("name", ["full", "merge-32", "merge-48-prompts"])
def test_served_variant_reaches_the_measured_accuracy(name):
    pipeline = load_pipeline(FOLDER)
    stage = pipeline.spec.stages[0]
    variant = stage.variant(train_finer_patches.VARIANT)
    model = load_model(model_spec(pipeline, FOLDER, stage, variant, 1.0))
    images = TASKS["crops"]("held-out", ROWS, 2)
    inputs = {"image": images.pixels, "task": torch.zeros(ROWS, dtype=torch.int64)}
    point = model.spec.point(name)
    assert point is not None
    with torch.inference_mode():
        labels = model.network.infer(inputs, point)["label"]
    share, expected = (
        float((labels == images.labels).double().mean()),
        VARIANT.point(name).accuracy_by_task["crops"].value,
    )

    assert abs(share - expected) < 4 * (expected * (1 - expected) / ROWS) ** 0.5


def test_merging_saves_operations_and_costs_accuracy():
    transformer, costs = train_finer_patches.halve_patches(load(FOLDER / train.WEIGHTS)), []
    for point in train_finer_patches.POINTS:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            transformer(torch.zeros(1, 1, 32, 32), forward_plan(point, transformer.shape.depth))
        costs.append(counter.get_total_flops())

    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < 0.4 * costs[0]
    assert VARIANT.operating_points[0].accuracy > VARIANT.operating_points[-1].accuracy


def test_training_starts_from_the_small_transformer(monkeypatch):
    monkeypatch.setattr(train, "training_images", lambda *_: stripes(8, side=32))
    losses: list[float] = []
    schedule = Schedule(2, 4, 1e-4, seed=1)
    finer = train_finer_patches.train_transformer(load(FOLDER / train.WEIGHTS), schedule, losses.append)
    checkpoint = train.add_heads(finer.transformer, finer.heads["plain"]["crops"], lambda _: None)

    assert len(losses) == 2
    assert finer.transformer.shape.patch == train_finer_patches.PATCH_PX
    assert set(checkpoint.heads["plain"]) == set(TASKS)

    monkeypatch.setattr(train_finer_patches, "PROMPT_SCHEDULE", Schedule(1, 4, 1e-3, seed=1))
    notes: list[str] = []
    prompted = train_finer_patches.add_prompts(checkpoint, notes.append)

    assert list(prompted.heads) == ["plain", "replace-1+merge-40", "replace-1+merge-48"]
    assert len(notes) == 2 * len(TASKS)
    assert not torch.equal(
        prompted.heads["replace-1+merge-48"]["crops"].weight, checkpoint.heads["plain"]["crops"].weight
    )
