"""Attention over slots, as transformers' attention interface takes it in.

A step is one packed row of tokens: first one token each of those who write, then chunks of prompts. Those who write
attend together, each to its slot; each chunk attends to its own. What a token sees of a slot is one run of positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as fn
from numpy.typing import NDArray
from torch import Tensor

from trimtab_model_servers.engine.store import Store

NAME: Final = "trimtab_slots"
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Single:
    """Tokens that are each alone in their slot, the first of a step.

    Attributes:
        count: how many.
        slots: which slots are looked at: a run of them, seen where they lie, or some, which are copied together.
        rows: where in the run each token's slot lies, int64 [count]; None where each slot looked at has its token.
        longest: positions looked at.
        mask: 0 where a slot's token sees a position, -inf elsewhere, [slots looked at, 1, 1, longest].
    """

    count: int
    slots: slice | Tensor
    rows: Tensor | None
    longest: int
    mask: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Tokens from ``start`` to ``end`` of a step, all of one slot; ``mask`` is [group * tokens, longest]."""

    start: int
    end: int
    slot: int
    longest: int
    mask: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """What each token of a step sees, in its slot's store. Worked out once a step, for all layers.

    Attributes:
        slots: each token's, int64 [tokens].
        single: those alone in their slot.
        runs: the others.
    """

    slots: Tensor
    single: Single | None
    runs: tuple[Run, ...]


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


def sight_of(
    slots: Places,
    seen: tuple[Places, Places],
    singles: int,
    runs: Sequence[tuple[int, int]],
    *,
    group: int,
    like: Tensor,
) -> Sight:
    """Work out what a step's tokens see.

    Args:
        slots: each token's slot, [tokens]; ascending over the singles.
        seen: the first position each sees and one beyond the last, above it, [tokens] each.
        singles: how many tokens, from the first, are each alone in their slot.
        runs: (from, to) of the tokens beyond those that share a slot.
        group: heads of queries that share one head of keys.
        like: a tensor of the kind and place of the masks.
    """
    low, high = seen
    single = _single_of(slots[:singles], low[:singles], high[:singles], like) if singles else None
    made = []
    for start, end in runs:
        mask = _mask(low[start:end], high[start:end], like)
        made.append(Run(start, end, int(slots[start]), mask.shape[1], mask.repeat(group, 1)))
    return Sight(torch.from_numpy(slots).to(like.device), single, tuple(made))


def _single_of(slots: Places, low: Places, high: Places, like: Tensor) -> Single:
    """Look at slots where they lie if half of the run they lie in is theirs: copying costs more than idling."""
    first, last, count = int(slots[0]), int(slots[-1]) + 1, len(slots)
    if last - first > 2 * count:
        mask = _mask(low, high, like)
        return Single(count, torch.from_numpy(slots).to(like.device), None, mask.shape[1], mask[:, None, None])
    if last - first == count:
        mask = _mask(low, high, like)
        return Single(count, slice(first, last), None, mask.shape[1], mask[:, None, None])
    rows, lows, highs = slots - first, np.zeros(last - first, np.int64), np.ones(last - first, np.int64)
    lows[rows], highs[rows] = low, high
    mask = _mask(lows, highs, like)
    at = torch.from_numpy(rows).to(like.device)
    return Single(count, slice(first, last), at, mask.shape[1], mask[:, None, None])


def _mask(low: Places, high: Places, like: Tensor) -> Tensor:
    """0 where a row sees a position and -inf elsewhere, [rows, longest]."""
    places = np.arange(int(high.max()))
    seen = (places >= low[:, None]) & (places < high[:, None])
    return torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf))).to(like)


def attend(query: Tensor, store: tuple[Tensor, Tensor], sight: Sight, scaling: float) -> Tensor:
    """Attend each token of ``query`` [heads, tokens, size] to its slot; returns [tokens, heads, size]."""
    keys, values = store
    heads, tokens, size = query.shape
    grouped = query.view(keys.shape[1], heads // keys.shape[1], tokens, size)
    seen = query.new_empty(tokens, heads, size)
    if sight.single is not None:
        seen[: sight.single.count] = _singles(grouped, keys, values, sight.single, scaling)
    for run in sight.runs:
        seen[run.start : run.end] = _run(grouped[:, :, run.start : run.end], keys, values, run, scaling)
    return seen


def _singles(query: Tensor, keys: Tensor, values: Tensor, single: Single, scaling: float) -> Tensor:
    """One token a slot, [key heads, group, tokens, size] to [count, heads, size]."""
    asked = query[:, :, : single.count].permute(2, 0, 1, 3)
    if single.rows is not None:
        spread = asked.new_zeros(single.mask.shape[0], *asked.shape[1:])
        spread[single.rows] = asked
        asked = spread
    keys, values = keys[single.slots, :, : single.longest], values[single.slots, :, : single.longest]
    seen = fn.scaled_dot_product_attention(asked, keys, values, attn_mask=single.mask, scale=scaling)
    return (seen if single.rows is None else seen[single.rows]).flatten(1, 2)


def _run(query: Tensor, keys: Tensor, values: Tensor, run: Run, scaling: float) -> Tensor:
    """A chunk of one slot, [key heads, group, n, size] to [n, heads, size]."""
    heads, group, count, size = query.shape
    rows = query.reshape(1, heads, group * count, size)
    own = slice(run.slot, run.slot + 1), slice(None), slice(run.longest)
    seen = fn.scaled_dot_product_attention(rows, keys[own], values[own], attn_mask=run.mask, scale=scaling)
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
