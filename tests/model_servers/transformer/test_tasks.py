"""Heads and prompts of many tasks in one batch."""

import pytest
import torch
from torch.nn.functional import linear

from trimtab_model_servers.transformer.tasks import Head, TaskBank


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


def test_each_row_uses_the_head_of_its_task():
    given = heads(5, 2, 9)
    features, tasks = torch.randn(6, 8), torch.tensor([2, 0, 0, 1, 2, 0])
    logits = TaskBank(given).logits(features, tasks)
    for row, task in enumerate(tasks.tolist()):
        own = linear(features[row], given[task].weight, given[task].bias)

        assert torch.allclose(logits[row, : len(own)], own, atol=1e-6)
        assert torch.isneginf(logits[row, len(own) :]).all()


def test_bank_shares_the_memory_of_its_heads():
    given = heads(5, 2, 9000)
    held = {one.data_ptr(): one.numel() for one in reached(TaskBank(given)) if one.dtype == torch.float32}

    assert sum(held.values()) == (5 + 2 + 9000) * (8 + 1)


def reached(holder):
    """All tensors that something holds."""
    if isinstance(holder, torch.Tensor):
        return [holder]
    if isinstance(holder, Head):
        return reached((holder.weight, holder.bias, holder.prompts))
    if isinstance(holder, tuple | list):
        return [tensor for one in holder for tensor in reached(one)]
    return reached(list(vars(holder).values())) if hasattr(holder, "__dict__") else []


def test_logits_are_as_wide_as_the_tasks_of_the_batch_need():
    bank, features = TaskBank(heads(5, 2, 9000)), torch.randn(3, 8)

    assert bank.logits(features, torch.tensor([1, 0, 1])).shape == (3, 5)
    assert bank.logits(features, torch.tensor([1, 1, 1])).shape == (3, 2)


def test_each_row_is_given_the_prompts_of_its_task():
    given = heads(5, 2, prompts=2)
    (alike,) = TaskBank(given).group_rows(torch.tensor([1, 0, 1]))
    (bare,) = TaskBank(heads(5)).group_rows(torch.tensor([0]))

    assert alike.rows.tolist() == [0, 1, 2]
    assert alike.prompts is not None
    assert torch.equal(alike.prompts, torch.stack([given[1].prompts, given[0].prompts, given[1].prompts]))
    assert bare.prompts is None


def test_rows_with_prompts_and_rows_without_go_apart():
    some, none = heads(5, 2, prompts=2), heads(3)
    first, other = TaskBank([some[0], *none, some[1]]).group_rows(torch.tensor([1, 2, 0, 1]))

    assert (first.rows.tolist(), other.rows.tolist()) == ([1, 2], [0, 3])
    assert first.prompts is not None
    assert torch.equal(first.prompts, torch.stack([some[1].prompts, some[0].prompts]))
    assert other.prompts is None


def test_prompts_of_one_way_must_be_alike_in_all_tasks():
    with pytest.raises(ValueError, match="must have the same shape in all tasks"):
        TaskBank([*heads(5, prompts=2), *heads(5, prompts=3)])
    with pytest.raises(ValueError, match="needs at least one task"):
        TaskBank([])
