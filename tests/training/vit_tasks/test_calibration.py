"""Confidence calibrated by temperatures, and escalation of rows of a token-merging point."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from trimtab_model_servers.server.hosted_model import load_model
from trimtab_model_servers.transformer.checkpoints import load, save, store_temperatures
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.model_spec import model_spec
from trimtab_training.task_training import LabelledImages
from trimtab_training.vit_tasks import points, train, train_finer_patches
from trimtab_training.vit_tasks.datasets import TASKS
from trimtab_training.vit_tasks.points import FULL

FOLDER = Path(__file__).parents[3] / "pipelines" / "vit-tasks"
ROWS = 2000
COUNTS = (1000, 1000, 1000, 80)
"""Held-out images by task."""


def scored(seed: int, *, sharpness: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of ten classes scaled by `sharpness`, and labels."""
    random = torch.Generator().manual_seed(seed)
    true = torch.randn(ROWS, 10, generator=random) * 1.5
    return true * sharpness, torch.multinomial(true.softmax(dim=1), 1, generator=random).view(-1)


def test_each_point_and_task_gets_its_own_temperature(monkeypatch) -> None:
    logits = {"one": scored(1, sharpness=3.0), "other": scored(2, sharpness=0.4)}
    images = {task: LabelledImages(torch.zeros(ROWS), labels) for task, (_, labels) in logits.items()}
    monkeypatch.setattr(points, "TASKS", {task: lambda *_, task=task: images[task] for task in images})
    monkeypatch.setattr(points, "task_logits", lambda _checkpoint, _point, task, _pixels: logits[task][0])
    temperatures = points.fit_temperatures(cast("Any", None), [FULL], lambda _: None)

    assert temperatures["plain"] == {"one": pytest.approx(3.0, rel=0.1), "other": pytest.approx(0.4, rel=0.1)}


def test_storing_temperatures_changes_nothing_else(tmp_path: Path) -> None:
    before, path = load(FOLDER / train.WEIGHTS), tmp_path / "weights.safetensors"
    save(before, path, {"seed": "3"})
    store_temperatures(path, {"plain": {"crops": 1.5}})
    after = load(path)

    assert after.temperatures == {"plain": {"crops": 1.5}}
    assert after.tasks == before.tasks
    for name, tensor in before.transformer.state_dict().items():
        assert torch.equal(tensor, after.transformer.state_dict()[name])


@pytest.mark.parametrize(
    ("variant", "weights"),
    [("vit-small", train.WEIGHTS), (train_finer_patches.VARIANT, train_finer_patches.WEIGHTS)],
)
def test_shipped_confidences_are_calibrated(variant: str, weights: str) -> None:
    stated: Any = load_pipeline(FOLDER).spec.stages[0].variant(variant).operating_points
    for point in stated:
        assert all(abs(one.mean_confidence - one.value) < 0.04 for one in point.accuracy_by_task.values())
        assert point.measured_accuracy().mean_confidence is None, "the mix of tasks is unknown"
    temperatures = load(FOLDER / weights).temperatures
    assert all(set(by_task) == set(TASKS) for by_task in temperatures.values())
    assert len(temperatures) == len(stated)


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
