"""Heads and prompts of tasks; each row of a batch uses those of its task."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, pad


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """Last layer of a task, with its prompts."""

    weight: Tensor
    """[classes, d]."""
    bias: Tensor
    """[classes]."""
    prompts: Tensor | None = None
    """[layers, P, d]."""

    def to(self, device: torch.device) -> "Head":
        prompts = None if self.prompts is None else self.prompts.to(device)
        return Head(self.weight.to(device), self.bias.to(device), prompts)


@dataclass(frozen=True, slots=True, eq=False)
class RowGroup:
    """Rows of a batch that share a forward pass."""

    rows: Tensor
    """Indices in the batch, int64 [n]."""
    prompts: Tensor | None
    """[n, layers, P, d], of each row."""


class TaskBank:
    """Heads of all tasks for one prompt variant, by reference."""

    def __init__(self, heads: Sequence[Head]) -> None:
        """Take heads in the order of the tasks' numbers.

        Raises:
            ValueError: no heads, or prompts of different shapes.
        """
        if not heads:
            raise ValueError("a transformer needs at least one task")
        shapes = {tuple(head.prompts.shape) for head in heads if head.prompts is not None}
        if len(shapes) > 1:
            raise ValueError(f"prompts of one variant must have the same shape in all tasks, but have {sorted(shapes)}")
        self.heads = tuple(heads)
        self.max_classes = max(len(head.bias) for head in heads)
        self._prompted = torch.tensor([head.prompts is not None for head in heads], device=heads[0].weight.device)

    def to(self, device: torch.device) -> "TaskBank":
        return TaskBank([head.to(device) for head in self.heads])

    def group_rows(self, tasks: Tensor) -> list[RowGroup]:
        """Group rows with and without prompts, by their tasks int64 [B]."""
        prompted = self._prompted[tasks]
        groups = [rows for rows in (prompted.nonzero().view(-1), (~prompted).nonzero().view(-1)) if len(rows)]
        return [RowGroup(rows, self._prompts(tasks[rows])) for rows in groups]

    def logits(self, features: Tensor, tasks: Tensor) -> Tensor:
        """Logits of each row's task: features [B, d], tasks int64 [B] to float32 [B, largest number of classes].

        Missing classes are -inf. Rows are computed task by task, so that no head is copied.
        """
        order = torch.argsort(tasks)
        present, counts = torch.unique_consecutive(tasks[order], return_counts=True)
        heads = [self.heads[task] for task in present.tolist()]
        max_classes = max(len(head.bias) for head in heads)
        parts = torch.split(features.float()[order], counts.tolist())
        logits = [
            pad(linear(rows, head.weight, head.bias), (0, max_classes - len(head.bias)), value=-torch.inf)
            for rows, head in zip(parts, heads, strict=True)
        ]
        return torch.cat(logits)[torch.argsort(order)]

    def _prompts(self, tasks: Tensor) -> Tensor | None:
        present, which = torch.unique(tasks, return_inverse=True)
        prompts = [head.prompts for head in map(self.heads.__getitem__, present.tolist()) if head.prompts is not None]
        return torch.stack(prompts).index_select(0, which) if prompts else None
