"""Attention over slots, as transformers' attention interface takes it in.

A step is one packed row of tokens: first one token each of those who write, then chunks of prompts. Those who write
attend together, each to its slot; each chunk attends to its own. What a token sees of a slot is one run of positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import torch
import torch.nn.functional as fn
from torch import Tensor

from trimtab_model_servers.engine.store import Store

NAME: Final = "trimtab_slots"


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """What each token of a step sees, in its slot's store.

    Attributes:
        slots: int64 [tokens].
        low: the first position each sees, int64 [tokens].
        high: one beyond the last, int64 [tokens]; above ``low``.
        single: how many tokens, from the first, are each alone in their slot.
        runs: beyond those, (from, to) of the tokens that share a slot.
        longest: the largest ``high`` of the single ones, and of each run.
    """

    slots: Tensor
    low: Tensor
    high: Tensor
    single: int
    runs: Sequence[tuple[int, int]]
    longest: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepContext:
    """What the attention of one step needs beside queries, keys and values.

    Attributes:
        own: the store of text, and what the tokens see in it.
        positions: where each token's keys and values go, int64 [tokens].
        across: the store of images, in a model that attends across; its keys and values lie there already.
        sighted: 1.0 for tokens of requests with images, [tokens, 1, 1]; the others' attention across is nothing.
        sees_images: 1.0 for tokens at or behind an image of theirs, [tokens, 1]; for the others the feed-forward part
        of
            the layers that attend across is left out.
    """

    own: tuple[Store, Sight]
    positions: Tensor
    across: tuple[Store, Sight] | None = None
    sighted: Tensor | None = None
    sees_images: Tensor | None = None


def attend(query: Tensor, store: tuple[Tensor, Tensor], sight: Sight, scaling: float) -> Tensor:
    """Attend each token of ``query`` [heads, tokens, size] to its slot; returns [tokens, heads, size]."""
    keys, values = store
    heads, tokens, size = query.shape
    grouped = query.view(keys.shape[1], heads // keys.shape[1], tokens, size)
    seen = query.new_empty(tokens, heads, size)
    if sight.single:
        seen[: sight.single] = _single(grouped[:, :, : sight.single], keys, values, sight, scaling)
    for (start, end), longest in zip(sight.runs, sight.longest[1:], strict=True):
        seen[start:end] = _run(grouped[:, :, start:end], keys, values, sight, (start, longest), scaling)
    return seen


def _single(query: Tensor, keys: Tensor, values: Tensor, sight: Sight, scaling: float) -> Tensor:
    """One token a slot, [key heads, group, n, size] to [n, heads, size]; slots are copied where they lie apart."""
    slots = sight.slots[: sight.single]
    longest = sight.longest[0]
    first, last = int(slots.min()), int(slots.max()) + 1
    together = last - first == sight.single and bool((slots[1:] > slots[:-1]).all())
    if together:
        keys, values = keys[first:last, :, :longest], values[first:last, :, :longest]
    else:
        keys, values = keys[slots, :, :longest], values[slots, :, :longest]
    places = torch.arange(longest, device=query.device)
    low, high = sight.low[: sight.single, None], sight.high[: sight.single, None]
    mask = ((places >= low) & (places < high))[:, None, None]
    rows = query.permute(2, 0, 1, 3)
    seen = fn.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scaling)
    return seen.flatten(1, 2)


def _run(query: Tensor, keys: Tensor, values: Tensor, sight: Sight, span: tuple[int, int], scaling: float) -> Tensor:
    """A chunk of one slot, [key heads, group, n, size] to [n, heads, size]."""
    start, longest = span
    heads, group, count, size = query.shape
    slot = int(sight.slots[start])
    places = torch.arange(longest, device=query.device)
    low, high = sight.low[start : start + count, None], sight.high[start : start + count, None]
    mask = ((places >= low) & (places < high)).repeat(group, 1)
    rows = query.reshape(1, heads, group * count, size)
    own = (keys[slot : slot + 1, :, :longest], values[slot : slot + 1, :, :longest])
    seen = fn.scaled_dot_product_attention(rows, *own, attn_mask=mask, scale=scaling)
    return seen.view(heads, group, count, size).permute(2, 0, 1, 3).reshape(count, heads * group, size)


def _slot_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    step_context: StepContext | None = None,
    **told: Any,
) -> tuple[Tensor, None]:
    """What each layer calls with one packed row, [1, heads, tokens, size]; returns [1, tokens, heads, size]."""
    del attention_mask, told
    if step_context is None:
        raise RuntimeError(
            "a model whose attention is over slots runs in the engine only; load another to run it alone"
        )
    layer = int(module.layer_idx)
    own, sight = step_context.own
    if layer in own.layers:
        own.write(layer, sight.slots, step_context.positions, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return attend(query[0], own.pair(layer), sight, scaling)[None], None
    if step_context.across is None or step_context.sighted is None:
        raise RuntimeError(f"layer {layer} attends across, but no request of this step has images")
    images, seen = step_context.across
    return (attend(query[0], images.pair(layer), seen, scaling) * step_context.sighted)[None], None


import_module("transformers").AttentionInterface.register(NAME, _slot_attention)  # its own types take mypy minutes
