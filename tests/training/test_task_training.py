"""A new task joins: it learns, the others stay as they were, and what does not fit is refused by name."""

from dataclasses import replace

import pytest
import torch

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.transformer.checkpoints import randomly
from trimtab_model_servers.transformer.config import ViTConfig
from trimtab_model_servers.transformer.tasks import Head
from trimtab_model_servers.transformer.transformer import ForwardPlan
from trimtab_pipelines.operating_point import OperatingPoint, TokenPrompts
from trimtab_training.prompt_tuning import Labelled, TrainingSchedule, fit_prompts, scored
from trimtab_training.task_training import TrainedTask, fitting, train_task, way_of

SMALL = ViTConfig(side=16, patch=4, channels=1, width=32, depth=2, heads=2, inner=64)
LESSON = TrainingSchedule(steps=40, batch=16, peak_rate=2e-2)


def stripes(count=32, side=16):
    """Stripes that lie, or stand."""
    random = torch.Generator().manual_seed(5)
    labels = torch.arange(count) % 2
    pixels = torch.randint(0, 60, (count, 1, side, side), generator=random)
    pixels[labels == 0, :, ::2] += 150
    pixels[labels == 1, :, :, ::2] += 150
    return Labelled(pixels.to(torch.uint8), labels)


def a_transformer():
    return replace(randomly(SMALL, 3, classes=5), normalisation="Image")


def learned(taught, stored, images=None, advance=lambda _: None):
    return train_task(stored.transformer, stored.normalisation, images or stripes(), taught, LESSON, advance)


def right(stored, course, head):
    images = stripes()
    found = scored(stored.transformer, images.pixels, stored.normalisation, course, head).argmax(dim=1)
    return float((found == images.labels).float().mean())


def test_a_new_task_is_learned_and_the_transformer_stays_as_it_was():
    stored = a_transformer()
    frozen = [parameter.clone() for parameter in stored.transformer.parameters()]
    heads = learned({"plain": TrainedTask(ForwardPlan())}, stored)

    assert right(stored, ForwardPlan(), heads["plain"]) > 0.9
    assert all(torch.equal(a, b) for a, b in zip(frozen, stored.transformer.parameters(), strict=True))


def test_every_way_gets_a_head_and_its_prompts_trained_with_what_goes_on_meanwhile():
    stored, merged = a_transformer(), ForwardPlan((4, 4))
    told: list[float] = []
    taught = {
        "plain": TrainedTask(ForwardPlan()),
        "merge-4": TrainedTask(merged),
        "replace-2+merge-4": TrainedTask(merged, 2),
    }
    heads = learned(taught, stored, advance=told.append)
    prompts = heads["replace-2+merge-4"].prompts

    assert list(heads) == list(taught)
    assert told[-1] == 1.0
    assert told == sorted(told)
    assert prompts is not None
    assert prompts.shape == (SMALL.depth, 2, SMALL.width)
    assert not torch.equal(heads["merge-4"].weight, heads["plain"].weight)
    for way in ("merge-4", "replace-2+merge-4"):
        assert right(stored, merged, heads[way]) > 0.9


def test_ways_for_which_a_file_has_no_room_are_left_out():
    taught = {
        "plain": TrainedTask(ForwardPlan()),
        "replace-9": TrainedTask(ForwardPlan(), 9),
        "merge-4": TrainedTask(ForwardPlan((4, 4))),
    }
    head_bytes, prompts_bytes = 2 * 5 * (SMALL.width + 1), 2 * 9 * SMALL.depth * SMALL.width

    assert list(fitting(taught, 5, SMALL, 3 * head_bytes + prompts_bytes)) == ["plain", "replace-9", "merge-4"]
    assert list(fitting(taught, 5, SMALL, 2 * head_bytes)) == ["plain", "merge-4"]
    assert list(fitting(taught, 5, SMALL, 1)) == ["plain"]


def test_a_way_that_nobody_trained_is_told_with_the_point_that_runs_it():
    point = OperatingPoint(name="fine", prompts=TokenPrompts(count=2), accuracy=0)
    with pytest.raises(ModelError, match=r"operating point 'fine': 'replace-2' is not trained"):
        way_of(a_transformer(), point)


def test_prompts_learn_on_a_course_that_merges():
    stored, images = a_transformer(), stripes()
    losses: list[float] = []
    begun = Head(torch.zeros(2, SMALL.width), torch.zeros(2))
    head = fit_prompts(
        stored.transformer,
        images,
        "Image",
        ForwardPlan((4, 4)),
        begun=begun,
        count=3,
        lesson=LESSON,
        advance=losses.append,
    )

    assert losses[-1] < losses[0]
    assert head.prompts is not None
    assert head.prompts.shape == (SMALL.depth, 3, SMALL.width)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (stripes(side=8), "this transformer takes"),
        (Labelled(stripes().pixels, stripes().labels[:5]), "labels; give one each"),
        (Labelled(stripes().pixels, stripes().labels * 2), "labels must be 0, 1, 2"),
        (Labelled(stripes().pixels, stripes().labels * 0), "labels must be 0, 1, 2"),
        (Labelled(stripes().pixels, stripes().labels - 1), "labels must be 0, 1, 2"),
    ],
    ids=["another size", "too few labels", "a gap", "one label", "negative"],
)
def test_what_does_not_fit_is_refused_and_says_why(images, words):
    with pytest.raises(ModelError, match=words):
        learned({"plain": TrainedTask(ForwardPlan())}, a_transformer(), images)
