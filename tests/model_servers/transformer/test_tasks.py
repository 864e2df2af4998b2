"""Heads and prompts of many tasks in one batch."""

import pytest
import torch

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
    assert torch.isneginf(bank.logits(features, torch.tensor([1, 0, 1]))[[0, 2], 2:]).all()


def test_prompts_of_one_way_must_be_alike_in_all_tasks():
    with pytest.raises(ValueError, match="must have the same shape in all tasks"):
        TaskBank([*heads(5, prompts=2), *heads(5, prompts=3)])
    with pytest.raises(ValueError, match="needs at least one task"):
        TaskBank([])
