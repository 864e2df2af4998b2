"""Heads and prompts of tasks; each row of a batch uses those of its task.

A prompt variant names the number and mode of prompts and the merging they were trained with. A point uses the variant
of its own merging, else the one without merging; a task with neither uses its plain head.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from trimtab_model_servers.errors import ModelError
from trimtab_pipelines.operating_point import OperatingPoint, TokenMerging

PLAIN = "plain"


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """Last layer of a task, with its prompts."""

    weight: Tensor
    """[classes, d]."""
    bias: Tensor
    """[classes]."""
    prompts: Tensor | None = None
    """[layers, P, d]."""

    @property
    def parts(self) -> dict[str, Tensor]:
        parts = {"weight": self.weight, "bias": self.bias}
        return parts if self.prompts is None else {**parts, "prompts": self.prompts}

    def to(self, device: torch.device) -> "Head":
        return Head(**{name: tensor.to(device) for name, tensor in self.parts.items()})


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
        """Take heads in the order of the tasks' numbers; ValueError without any, or if prompts differ in shape."""
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
        """Logits of rows [B, d], -inf for classes a task lacks; computed task by task, so that no head is copied."""
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


def prompt_variant(point: OperatingPoint) -> str:
    """The variant that matches a point exactly, such as `replace-4`, `merge-8` or `replace-2+merge-8-energy`."""
    prompts = f"{point.prompts.mode.lower()}-{point.prompts.count}" if point.prompts else ""
    return "+".join(part for part in (prompts, _merge_suffix(point.merging)) if part) or PLAIN


def prompt_variants(point: OperatingPoint) -> tuple[str, ...]:
    """The variants that a point may use, best first."""
    unmerged = prompt_variant(point.replace(merging=None))
    return tuple(dict.fromkeys((prompt_variant(point), unmerged)))


def require_trained(point: OperatingPoint, trained: Collection[str]) -> None:
    """Raise ModelError if none of a point's variants is trained."""
    if not any(variant in trained for variant in prompt_variants(point)):
        raise ModelError(
            f"operating point {point.name!r}: {prompt_variants(point)[0]!r} is not trained for these tasks; "
            f"the weights have: {', '.join(trained)}"
        )


def fallback_order(point: OperatingPoint) -> tuple[str, ...]:
    """The variants that a task may use at a point, best first; the last is PLAIN."""
    return tuple(dict.fromkeys((*prompt_variants(point), PLAIN)))


def prompt_counts(points: Iterable[OperatingPoint]) -> dict[str, int]:
    """Prompts per layer of every variant that some points use."""
    counts = {
        variant: point.prompts.count if point.prompts else 0
        for point in points
        for variant in prompt_variants(point)
        if variant != PLAIN
    }
    return {PLAIN: 0} | counts


def _merge_suffix(merging: TokenMerging | None) -> str:
    if merging is None or not any(merging.schedule):
        return ""
    return "-".join(["merge", ".".join(map(str, merging.schedule)), *([merging.rule] if merging.rule else [])])
