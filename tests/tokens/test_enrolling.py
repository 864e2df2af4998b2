"""A new task joins: it learns, the others stay as they were, and what does not fit is refused by name."""

from dataclasses import replace

import pytest
import torch

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.tokens.enrolling import enrolled, right_of
from trimtab_model_servers.tokens.prompting import Labelled, Lesson, fit_prompts
from trimtab_model_servers.tokens.shape import Shape
from trimtab_model_servers.tokens.stored import load, randomly, save
from trimtab_model_servers.tokens.tasks import Head
from trimtab_model_servers.tokens.transformer import Course
from trimtab_pipelines.operating_point import Merging, OperatingPoint, Prompts

SMALL = Shape(side=16, patch=4, channels=1, width=32, depth=2, heads=2, inner=64)
FULL = OperatingPoint(name="full", accuracy=0)
MERGED = OperatingPoint(name="merge-4", merging=Merging(schedule=(4,)), accuracy=0)
LESSON = Lesson(steps=40, batch=16, peak_rate=2e-2)


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


def right(stored, point, task, images):
    return right_of(stored, point, task, images) / len(images.labels)


def test_a_new_task_is_learned_and_the_others_stay_as_they_were(tmp_path):
    before = a_transformer()
    frozen = [parameter.clone() for parameter in before.transformer.parameters()]
    made = enrolled(before, "stripes", stripes(), (FULL, MERGED), LESSON)
    save(made, tmp_path / "weights.safetensors", {})
    again = load(tmp_path / "weights.safetensors")

    assert list(again.tasks) == ["default", "stripes"]
    assert right(made, FULL, "stripes", stripes()) > 0.9
    assert torch.equal(made.heads["plain"]["default"].weight, before.heads["plain"]["default"].weight)
    assert all(torch.equal(a, b) for a, b in zip(frozen, before.transformer.parameters(), strict=True))


def test_where_others_have_prompts_the_new_one_gets_as_many_trained_with_what_goes_on_meanwhile():
    plain = a_transformer()
    known = plain.heads["plain"]["default"]
    prompted = Head(known.weight, known.bias, torch.zeros(SMALL.depth, 2, SMALL.width))
    both = replace(plain, heads={**plain.heads, "replace-2+merge-4": {"default": prompted}})
    point = OperatingPoint(
        name="p", merging=Merging(schedule=(4,)), prompts=Prompts(count=2, mode="Replace"), accuracy=0
    )
    told: list[float] = []
    made = enrolled(both, "stripes", stripes(), (FULL, point), LESSON, told.append)

    prompts = made.heads["replace-2+merge-4"]["stripes"].prompts

    assert list(made.heads) == ["plain", "replace-2+merge-4"]
    assert told[-1] == 1.0
    assert told == sorted(told)
    assert prompts is not None
    assert prompts.shape == (SMALL.depth, 2, SMALL.width)
    assert right(made, point, "stripes", stripes()) > 0.9


def test_prompts_learn_on_a_course_that_merges():
    stored, images = a_transformer(), stripes()
    losses: list[float] = []
    begun = Head(torch.zeros(2, SMALL.width), torch.zeros(2))
    head = fit_prompts(
        stored.transformer,
        images,
        "Image",
        Course((4, 4)),
        begun=begun,
        count=3,
        lesson=LESSON,
        advance=losses.append,
    )

    assert losses[-1] < losses[0]
    assert head.prompts is not None
    assert head.prompts.shape == (SMALL.depth, 3, SMALL.width)


@pytest.mark.parametrize(
    ("task", "images", "words"),
    [
        ("default", stripes(), "there is a task 'default' already"),
        ("new", stripes(side=8), "this transformer takes"),
        ("new", Labelled(stripes().pixels, stripes().labels[:5]), "labels; give one each"),
        ("new", Labelled(stripes().pixels, stripes().labels * 2), "labels must be 0, 1, 2"),
        ("new", Labelled(stripes().pixels, stripes().labels * 0), "labels must be 0, 1, 2"),
        ("new", Labelled(stripes().pixels, stripes().labels - 1), "labels must be 0, 1, 2"),
    ],
    ids=["twice", "another size", "too few labels", "a gap", "one label", "negative"],
)
def test_what_does_not_fit_is_refused_and_says_why(task, images, words):
    with pytest.raises(ModelError, match=words):
        enrolled(a_transformer(), task, images, (FULL,), LESSON)
