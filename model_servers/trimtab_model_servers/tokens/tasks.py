"""What differs between tasks: heads, and learned prompts. Gathered row by row, so that one batch mixes tasks."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A task's last layer, with the prompts it was trained with.

    Attributes:
        weight: [classes, d].
        bias: [classes].
        prompts: [layers, P, d]; None without prompts.
    """

    weight: Tensor
    bias: Tensor
    prompts: Tensor | None = None


class Bank:
    """The heads of all tasks for one way to run, side by side.

    Tasks may have different numbers of classes: those that a task lacks are never the likeliest.
    """

    def __init__(self, heads: Sequence[Head]) -> None:
        """Stack heads in the order of the tasks' numbers.

        Raises:
            ValueError: when there is none, or their prompts are of different shapes.
        """
        if not heads:
            raise ValueError("a transformer without any task answers nothing; give it one")
        shapes = {tuple(head.prompts.shape) if head.prompts is not None else () for head in heads}
        if len(shapes) > 1:
            raise ValueError(f"prompts of one way to run must have one shape in all tasks, but: {sorted(shapes)}")
        most = max(len(head.bias) for head in heads)
        self.classes = tuple(len(head.bias) for head in heads)
        self.weight = torch.stack([_filled(head.weight, most, 0.0) for head in heads])
        self.bias = torch.stack([_filled(head.bias, most, -torch.inf) for head in heads])
        given = [head.prompts for head in heads if head.prompts is not None]
        self._prompts = torch.stack(given) if given else None

    def on(self, device: torch.device) -> "Bank":
        """The same heads on a device."""
        moved = copy(self)
        moved.__dict__.update({name: held.to(device) for name, held in vars(self).items() if isinstance(held, Tensor)})
        return moved

    def prompts(self, tasks: Tensor) -> Tensor | None:
        """The prompts of each row's task: tasks int64 [B] to [B, layers, P, d]; None without prompts."""
        return None if self._prompts is None else self._prompts.index_select(0, tasks)

    def logits(self, features: Tensor, tasks: Tensor) -> Tensor:
        """Each row's logits under its own task: features [B, d], tasks int64 [B] to [B, most classes].

        All rows go through the heads that the batch needs, in one product; each then keeps its own. Heads are small
        beside the transformer, and gathering their weights row by row would move more than it saves.
        """
        present, which = torch.unique(tasks, return_inverse=True)
        weight, bias = self.weight.index_select(0, present), self.bias.index_select(0, present)
        every = torch.nn.functional.linear(features, weight.flatten(0, 1), bias.flatten())
        return every.view(len(features), *bias.shape)[torch.arange(len(features), device=tasks.device), which]


def _filled(rows: Tensor, count: int, value: float) -> Tensor:
    missing = rows.new_full((count - len(rows), *rows.shape[1:]), value)
    return torch.cat([rows, missing])
