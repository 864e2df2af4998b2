"""Attention over slots, as transformers' attention interface takes it in.

A step is one packed row of tokens: first one token each of those who write, then chunks of prompts. Those who write
attend together, each to its slot; each chunk attends to its own. What a token sees of a slot is one run of positions.
"""

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Final

import torch.nn.functional as fn
from torch import Tensor

from trimtab_model_servers.engine.attention_masks import DecodeTokens, Run, StepMask
from trimtab_model_servers.engine.kv_cache import KvCache

NAME: Final = "trimtab_kv_slots"


@dataclass(frozen=True, slots=True, eq=False)
class StepContext:
    """What the attention of one step needs beside queries, keys and values.

    Attributes:
        own: the store of text, and what the tokens see in it.
        positions: where in its slot each token stands, int64 [tokens].
        rows: where the store takes the keys and values of each token, as ``Store.rows`` has them.
        across: the store of images, in a model that attends across; its keys and values lie there already.
        sighted: 1.0 for tokens of requests with images, [tokens, 1, 1]; the others' attention across is nothing. None
            where all have images.
        sees_images: 1.0 for tokens at or behind an image of theirs, [tokens, 1]; for the others the feed-forward part
            of the layers that attend across is left out. None where all are.
    """

    own: tuple[KvCache, StepMask]
    positions: Tensor
    rows: Tensor
    across: tuple[KvCache, StepMask] | None = None
    sighted: Tensor | None = None
    sees_images: Tensor | None = None

    def moved_on(self) -> "StepContext | None":
        """The next step, where it is of the same requests, each of which writes; None: it must be worked out anew.

        Tensors are changed in place, so that the step before is no longer to be used.
        """
        store, sight = self.own
        if sight.runs or sight.single is None:
            return None
        self.positions.add_(1)
        self.rows.add_(1)
        single = sight.single.moved_on(self.positions)
        return None if single is None else replace(self, own=(store, StepMask(single, ())))


def attend(query: Tensor, store: tuple[Tensor, Tensor], sight: StepMask, scaling: float) -> Tensor:
    """Attend each token of ``query`` [heads, tokens, size] to its slot; returns [tokens, heads, size]."""
    keys, values = store
    heads, tokens, size = query.shape
    grouped = query.view(keys.shape[1], heads // keys.shape[1], tokens, size)
    if sight.single is not None and not sight.runs:
        return _singles(grouped, keys, values, sight.single, scaling)
    seen = query.new_empty(tokens, heads, size)
    if sight.single is not None:
        seen[: sight.single.count] = _singles(grouped, keys, values, sight.single, scaling)
    for run in sight.runs:
        seen[run.start : run.end] = _run(grouped[:, :, run.start : run.end], keys, values, run, scaling)
    return seen


def _singles(query: Tensor, keys: Tensor, values: Tensor, single: DecodeTokens, scaling: float) -> Tensor:
    """One token a slot, [key heads, group, tokens, size] to [count, heads, size]."""
    asked = query[:, :, : single.count].permute(2, 0, 1, 3)
    if single.spread:
        asked = asked.new_zeros(single.mask.shape[0], *asked.shape[1:]).index_copy_(0, single.rows, asked)
    keys, values = (kept.narrow(2, 0, single.longest)[single.slots] for kept in (keys, values))
    seen = fn.scaled_dot_product_attention(asked, keys, values, attn_mask=single.mask, scale=scaling)
    return (seen.index_select(0, single.rows) if single.spread else seen).flatten(1, 2)


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
    if own.holds(layer):
        own.write(layer, step_context.rows, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return attend(query[0], own.pair(layer), sight, scaling)[None], None
    if step_context.across is None:
        raise RuntimeError(f"layer {layer} attends across, but no request of this step has images")
    images, seen = step_context.across
    looked = attend(query[0], images.pair(layer), seen, scaling)
    return (looked if step_context.sighted is None else looked * step_context.sighted)[None], None


import_module("transformers").AttentionInterface.register(NAME, _slot_attention)  # its own types take mypy minutes
