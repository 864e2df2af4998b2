"""Training of a new task: heads, prompts, file size and rejected images."""

from dataclasses import replace

import pytest
import torch

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.transformer.checkpoints import random_checkpoint
from trimtab_model_servers.transformer.config import ViTConfig
from trimtab_model_servers.transformer.transformer import ForwardPlan
from trimtab_pipelines.operating_point import OperatingPoint, TokenPrompts
from trimtab_training.task_training import (
    LabelledImages,
    PromptSpec,
    compute_features,
    select_fitting,
    train_task,
    trained_prompt_variant,
)
from trimtab_training.trainer import Schedule

SMALL = ViTConfig(side=16, patch=4, channels=1, width=32, depth=2, heads=2, inner=64)
SCHEDULE = Schedule(steps=40, batch=16, peak_rate=2e-2, seed=21)


def stripes(count=32, side=16):
    """Images of horizontal and of vertical stripes."""
    random = torch.Generator().manual_seed(5)
    labels = torch.arange(count) % 2
    pixels = torch.randint(0, 60, (count, 1, side, side), generator=random)
    pixels[labels == 0, :, ::2] += 150
    pixels[labels == 1, :, :, ::2] += 150
    return LabelledImages(pixels.to(torch.uint8), labels)


def a_transformer():
    return replace(random_checkpoint(SMALL, 3, classes=5), normalisation="Image")


def train(specs, checkpoint, images=None, advance=lambda _: None):
    return train_task(checkpoint.transformer, checkpoint.normalisation, images or stripes(), specs, SCHEDULE, advance)


def accuracy(checkpoint, plan, head):
    images = stripes()
    arguments = checkpoint.transformer, images.pixels, checkpoint.normalisation, plan, head.prompts
    logits = compute_features(*arguments) @ head.weight.T + head.bias
    return float((logits.argmax(dim=1) == images.labels).float().mean())


def test_training_a_task_keeps_the_transformer():
    checkpoint = a_transformer()
    frozen = [parameter.clone() for parameter in checkpoint.transformer.parameters()]
    heads = train({"plain": PromptSpec(ForwardPlan())}, checkpoint)

    assert accuracy(checkpoint, ForwardPlan(), heads["plain"]) > 0.9
    assert all(torch.equal(a, b) for a, b in zip(frozen, checkpoint.transformer.parameters(), strict=True))


def test_every_prompt_variant_gets_a_head_and_prompts():
    checkpoint, merged = a_transformer(), ForwardPlan((4, 4))
    shares: list[float] = []
    specs = {
        "plain": PromptSpec(ForwardPlan()),
        "merge-4": PromptSpec(merged),
        "replace-2+merge-4": PromptSpec(merged, 2),
    }
    heads = train(specs, checkpoint, advance=shares.append)
    prompts = heads["replace-2+merge-4"].prompts

    assert list(heads) == list(specs)
    assert shares[-1] == 1.0
    assert shares == sorted(shares)
    assert prompts is not None
    assert prompts.shape == (SMALL.depth, 2, SMALL.width)
    assert not torch.equal(heads["merge-4"].weight, heads["plain"].weight)
    for variant in ("merge-4", "replace-2+merge-4"):
        assert accuracy(checkpoint, merged, heads[variant]) > 0.9


def test_variants_beyond_the_file_size_are_excluded():
    specs = {
        "plain": PromptSpec(ForwardPlan()),
        "replace-9": PromptSpec(ForwardPlan(), 9),
        "merge-4": PromptSpec(ForwardPlan((4, 4))),
    }
    head_bytes, prompts_bytes = 2 * 5 * (SMALL.width + 1), 2 * 9 * SMALL.depth * SMALL.width

    assert list(select_fitting(specs, 5, SMALL, 3 * head_bytes + prompts_bytes)) == ["plain", "replace-9", "merge-4"]
    assert list(select_fitting(specs, 5, SMALL, 2 * head_bytes)) == ["plain", "merge-4"]
    assert list(select_fitting(specs, 5, SMALL, 1)) == ["plain"]


def test_point_without_trained_variant_is_rejected():
    point = OperatingPoint(name="fine", prompts=TokenPrompts(count=2), accuracy=0)
    with pytest.raises(ModelError, match=r"operating point 'fine': 'replace-2' is not trained"):
        trained_prompt_variant(a_transformer(), point)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (stripes(side=8), "this transformer takes"),
        (LabelledImages(stripes().pixels, stripes().labels[:5]), "labels; each needs one"),
        (LabelledImages(stripes().pixels, stripes().labels * 2), "labels must be 0, 1, 2"),
        (LabelledImages(stripes().pixels, stripes().labels * 0), "labels must be 0, 1, 2"),
        (LabelledImages(stripes().pixels, stripes().labels - 1), "labels must be 0, 1, 2"),
    ],
    ids=["another size", "too few labels", "a gap", "one label", "negative"],
)
def test_mismatched_images_are_rejected(images, message):
    with pytest.raises(ModelError, match=message):
        train({"plain": PromptSpec(ForwardPlan())}, a_transformer(), images)
