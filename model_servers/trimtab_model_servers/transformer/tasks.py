"""What differs between tasks: heads, and learned prompts. Each row of a batch gets those of its own task."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, pad


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

    def to(self, device: torch.device) -> "Head":
        """The same on a device; itself where it is there."""
        prompts = None if self.prompts is None else self.prompts.to(device)
        return Head(self.weight.to(device), self.bias.to(device), prompts)


@dataclass(frozen=True, slots=True, eq=False)
class RowGroup:
    """Rows of a batch that can go through a transformer together.

    Attributes:
        rows: their places in the batch, int64 [n].
        prompts: [n, layers, P, d], each row's own; None where they have none.
    """

    rows: Tensor
    prompts: Tensor | None


class TaskBank:
    """The heads of all tasks for one way to run, by reference: a bank takes no memory beside them."""

    def __init__(self, heads: Sequence[Head]) -> None:
        """Take heads in the order of the tasks' numbers.

        Raises:
            ValueError: when there is none, or their prompts are of different shapes.
        """
        if not heads:
            raise ValueError("a transformer without any task answers nothing; give it one")
        shapes = {tuple(head.prompts.shape) for head in heads if head.prompts is not None}
        if len(shapes) > 1:
            raise ValueError(f"prompts of one way to run must have one shape in all tasks, but: {sorted(shapes)}")
        self.heads = tuple(heads)
        self.max_classes = max(len(head.bias) for head in heads)
        self._prompted = torch.tensor([head.prompts is not None for head in heads], device=heads[0].weight.device)

    def to(self, device: torch.device) -> "TaskBank":
        """The same heads on a device."""
        return TaskBank([head.to(device) for head in self.heads])

    def group_rows(self, tasks: Tensor) -> list[RowGroup]:
        """Divide rows into those whose tasks have prompts and those whose have none: one part where all are alike.

        Args:
            tasks: int64 [B].
        """
        prompted = self._prompted[tasks]
        parts = [rows for rows in (prompted.nonzero().view(-1), (~prompted).nonzero().view(-1)) if len(rows)]
        return [RowGroup(rows, self._prompts(tasks[rows])) for rows in parts]

    def logits(self, features: Tensor, tasks: Tensor) -> Tensor:
        """Each row's logits under its own task: features [B, d], tasks int64 [B] to float32 [B, most classes there].

        Those that a task lacks are never the likeliest. Rows go task by task through their head as it lies; nothing of
        a head is copied, however large it is.
        """
        order = torch.argsort(tasks)
        present, counts = torch.unique_consecutive(tasks[order], return_counts=True)
        heads = [self.heads[task] for task in present.tolist()]
        most = max(len(head.bias) for head in heads)
        parts = torch.split(features.float()[order], counts.tolist())
        every = [
            pad(linear(rows, head.weight, head.bias), (0, most - len(head.bias)), value=-torch.inf)
            for rows, head in zip(parts, heads, strict=True)
        ]
        return torch.cat(every)[torch.argsort(order)]

    def _prompts(self, tasks: Tensor) -> Tensor | None:
        present, which = torch.unique(tasks, return_inverse=True)
        given = [self.heads[task].prompts for task in present.tolist()]
        there = [prompts for prompts in given if prompts is not None]
        return torch.stack(there).index_select(0, which) if there else None
