"""Heads and prompts of many tasks in one batch."""

import pytest
import torch
from torch.nn.functional import linear

from trimtab_model_servers.tokens.tasks import Bank, Head


def heads(*classes, prompts=0):
    random = torch.Generator().manual_seed(4)
    return [
        Head(
            torch.randn(count, 8, generator=random),
            torch.randn(count, generator=random),
            torch.randn(3, prompts, 8, generator=random) if prompts else None,
        )
        for count in classes
    ]


def test_each_row_is_judged_by_its_own_task_alone():
    given = heads(5, 2, 9)
    features, tasks = torch.randn(6, 8), torch.tensor([2, 0, 0, 1, 2, 0])
    logits = Bank(given).logits(features, tasks)
    for row, task in enumerate(tasks.tolist()):
        own = linear(features[row], given[task].weight, given[task].bias)

        assert torch.allclose(logits[row, : len(own)], own, atol=1e-6)
        assert torch.isneginf(logits[row, len(own) :]).all()


def test_each_row_is_given_the_prompts_of_its_task():
    given = heads(5, 2, prompts=2)
    prompts = Bank(given).prompts(torch.tensor([1, 0, 1]))

    assert prompts is not None
    assert torch.equal(prompts, torch.stack([given[1].prompts, given[0].prompts, given[1].prompts]))
    assert Bank(heads(5)).prompts(torch.tensor([0])) is None


def test_prompts_of_one_way_must_be_alike_in_all_tasks():
    with pytest.raises(ValueError, match="must have one shape in all tasks"):
        Bank([*heads(5, prompts=2), *heads(5, prompts=3)])
    with pytest.raises(ValueError, match="without any task"):
        Bank([])
