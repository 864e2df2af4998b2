"""Confidence made true by temperatures, and second looks at what a merging point doubts."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from trimtab_model_servers.model import load_model
from trimtab_model_servers.transformer.checkpoints import load, save, store_temperatures
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.model_spec import model_spec
from trimtab_training.vit_tasks import calibration, train, train_finer_patches
from trimtab_training.vit_tasks.datasets import TASKS
from trimtab_training.vit_tasks.evaluate import Scored
from trimtab_training.vit_tasks.operating_points import FULL, merging

FOLDER = Path(__file__).parents[3] / "pipelines" / "vit-tasks"
FILES = {
    "vit-small": ("accuracy.json", train.WEIGHTS),
    train_finer_patches.VARIANT: (train_finer_patches.ACCURACY, train_finer_patches.WEIGHTS),
}
ROWS = 2000
MERGED = merging(8)
COUNTS = (1000, 1000, 1000, 80)
"""Held-out images by task."""


def scored(seed: int, *, lost: float, sharpness: float) -> Scored:
    """Ten classes whose logits are `sharpness` times what they should be; of the right ones a share is lost."""
    random = torch.Generator().manual_seed(seed)
    true = torch.randn(ROWS, 10, generator=random) * 1.5
    labels = torch.multinomial(true.softmax(dim=1), 1, generator=random).view(-1)
    doubtful = true.softmax(dim=1).amax(dim=1) < true.softmax(dim=1).amax(dim=1).median()
    swapped = doubtful & (torch.rand(ROWS, generator=random) < lost)
    return Scored((true.where(~swapped[:, None], true.roll(1, dims=1))) * sharpness, labels)


def both() -> dict[str, dict[str, Scored]]:
    return {
        FULL.name: {"one": scored(1, lost=0.0, sharpness=3.0), "other": scored(2, lost=0.0, sharpness=0.4)},
        MERGED.name: {"one": scored(1, lost=0.5, sharpness=3.0), "other": scored(2, lost=0.5, sharpness=0.4)},
    }


def test_each_point_and_task_gets_the_temperature_that_undoes_its_heads_boast() -> None:
    found = calibration.temperatures(both(), [FULL])

    assert found["plain"]["one"] == pytest.approx(3.0, rel=0.1)
    assert found["plain"]["other"] == pytest.approx(0.4, rel=0.1)
    told = calibration.mean_confidence(both(), [FULL])["full"]
    assert told["with"]["error"] < 0.3 * told["without"]["error"]
    assert max(abs(one) for one in told["with"]["bias"].values()) < 0.03 < told["without"]["bias"]["one"]


def test_a_confidence_that_is_judged_knows_nothing_of_its_own_half() -> None:
    """A temperature fitted to an image's own label would change with that label."""
    one = scored(3, lost=0.0, sharpness=2.0)
    (own, other), _ = calibration._halves(ROWS)
    before = calibration.seen({"one": one}).confidence
    labels = one.labels.clone()
    labels[own[:300]] = (labels[own[:300]] + 5) % 10
    after = calibration.seen({"one": Scored(one.logits, labels)}).confidence

    assert sorted([*own.tolist(), *other.tolist()]) == list(range(ROWS))
    assert (after[own] == before[own]).all()
    assert (after[other] != before[other]).any()


def test_rows_that_merging_spoils_are_looked_at_again_and_it_is_written(tmp_path: Path) -> None:
    looks = calibration.escalations(both(), [FULL, MERGED])

    assert not looks[FULL.name]
    assert {look.to for look in looks[MERGED.name]} == {FULL.name}
    assert min(look.share for look in looks[MERGED.name]) < 0.6
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        "spec:\n  stages:\n  - name: classify\n    variants:\n    - name: vit\n      operatingPoints:\n"
        "      - name: full\n        accuracy: 0.9\n      - name: merge-8\n        accuracy: 0.8\n"
    )
    calibration.write_escalations(file, "vit", looks)
    assert file.read_text().count("{to: full, confidenceBelow: ") == len(looks[MERGED.name])


def test_temperatures_are_stored_and_nothing_else_changes(tmp_path: Path) -> None:
    before, path = load(FOLDER / train.WEIGHTS), tmp_path / "weights.safetensors"
    save(before, path, {"seed": "3"})
    store_temperatures(path, {"plain": {"crops": 1.5}})
    after = load(path)

    assert after.temperatures == {"plain": {"crops": 1.5}}
    assert after.tasks == before.tasks
    for name, tensor in before.transformer.state_dict().items():
        assert torch.equal(tensor, after.transformer.state_dict()[name])


@pytest.mark.parametrize("variant", FILES)
def test_confidences_are_as_measured_and_near_the_truth(variant: str) -> None:
    """Drifts are told by what a confidence changes; second looks need it near the truth."""
    file, weights = FILES[variant]
    told = json.loads((FOLDER / file).read_text())["confidence"]
    points = load_pipeline(FOLDER).spec.stages[0].variant(variant).operating_points

    assert list(told) == [point.name for point in points]
    for point in points:
        means = {
            task: one.value + told[point.name]["with"]["bias"][task] for task, one in point.accuracy_by_task.items()
        }
        assert {task: one.mean_confidence for task, one in point.accuracy_by_task.items()} == pytest.approx(means)
        assert point.measured_accuracy().mean_confidence is None, (
            "of which mix of tasks rows are that name none, nobody knows"
        )
    assert all(abs(bias) < 0.04 for point in told.values() for bias in point["with"]["bias"].values())
    assert any(abs(bias) > 0.06 for point in told.values() for bias in point["without"]["bias"].values())
    assert all(set(by_task) == set(TASKS) for by_task in load(FOLDER / weights).temperatures.values())
    assert len(load(FOLDER / weights).temperatures) == len(points)


def test_the_pipeline_offers_second_looks_where_merging_costs_and_the_model_says_how_certain_it_is() -> None:
    pipeline = load_pipeline(FOLDER)
    stage = pipeline.spec.stages[0]
    variant = stage.variant(train_finer_patches.VARIANT)
    offered = {point.name: point.escalations for point in variant.operating_points if point.escalations}

    assert set(offered) == {"merge-40-prompts", "merge-48-prompts"}
    for name, looks in offered.items():
        for look in looks:
            assert look.samples == 3080
            assert look.accuracy_low is not None
            assert look.accuracy_low < look.accuracy
            assert set(look.by_task) == set(TASKS)
            shares = {task: one.share for task, one in look.by_task.items()}
            assert look.share == pytest.approx(np.average([shares[task] for task in TASKS], weights=COUNTS), abs=2e-4)
            assert variant.point(name).accuracy + 0.0049 < look.accuracy
    model = load_model(model_spec(pipeline, FOLDER, stage, variant, 1.0))
    images = TASKS["turned"]("held-out", 256, 2)
    inputs = {"image": images.pixels, "task": torch.full((256,), list(TASKS).index("turned"))}
    point = model.spec.point("merge-24")
    assert point is not None
    with torch.inference_mode():
        answer = model.network.infer(inputs, point)
    right = (answer["label"] == images.labels).double().mean()
    assert abs(float(answer["confidence"].mean() - right)) < 3 * (0.36 * 0.64 / 256) ** 0.5
