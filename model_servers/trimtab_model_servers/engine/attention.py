"""Attention over KV slots, registered with transformers' attention interface.

A step is one packed row of tokens: first one token of each decoding request, then prefill chunks. The decodes attend
together, each to its slot; each chunk attends to its own slot. A token attends to one contiguous range of positions.
"""

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Final

import torch.nn.functional as fn
from torch import Tensor

from trimtab_model_servers.engine.attention_masks import ChunkMask, DecodeMask, StepMask
from trimtab_model_servers.engine.kv_cache import KvCache

ATTENTION_NAME: Final = "trimtab_kv_slots"


@dataclass(frozen=True, slots=True, eq=False)
class StepContext:
    """Inputs of one step's attention besides queries, keys and values."""

    self_attention: tuple[KvCache, StepMask]
    positions: Tensor
    """Position of each token in its slot, int64 [tokens]."""
    cache_rows: Tensor
    """Rows of the KV cache that each token's keys and values are written to, as of ``KvCache.row_indices``."""
    cross_attention: tuple[KvCache, StepMask] | None = None
    """KV cache of the images, filled before the step, and its mask."""
    has_images: Tensor | None = None
    """1.0 for tokens of requests with images, else 0.0, which zeroes their cross-attention; [tokens, 1, 1].
    None if all requests have images."""
    after_image: Tensor | None = None
    """1.0 for tokens at or after an image; the others skip the feed-forward part of the cross-attention layers;
    [tokens, 1]. None if all tokens are."""

    def advance(self) -> "StepContext | None":
        """The context of the next step if it decodes the same requests; None if it must be computed anew.

        Tensors are changed in place: the context of the step before must not be used again.
        """
        cache, mask = self.self_attention
        if mask.chunks or mask.decode is None:
            return None
        self.positions.add_(1)
        self.cache_rows.add_(1)
        decode = mask.decode.advance(self.positions)
        return None if decode is None else replace(self, self_attention=(cache, StepMask(decode, ())))


def attend(query: Tensor, layer: tuple[Tensor, Tensor], mask: StepMask, scaling: float) -> Tensor:
    """Attend each token of ``query`` [heads, tokens, size] to its slot; returns [tokens, heads, size]."""
    keys, values = layer
    heads, tokens, size = query.shape
    grouped = query.view(keys.shape[1], heads // keys.shape[1], tokens, size)
    if mask.decode is not None and not mask.chunks:
        return _attend_decodes(grouped, keys, values, mask.decode, scaling)
    output = query.new_empty(tokens, heads, size)
    if mask.decode is not None:
        output[: mask.decode.count] = _attend_decodes(grouped, keys, values, mask.decode, scaling)
    for chunk in mask.chunks:
        chunk_query = grouped[:, :, chunk.start : chunk.end]
        output[chunk.start : chunk.end] = _attend_chunk(chunk_query, keys, values, chunk, scaling)
    return output


def _attend_decodes(query: Tensor, keys: Tensor, values: Tensor, mask: DecodeMask, scaling: float) -> Tensor:
    """One token per slot: [KV heads, group, tokens, size] to [count, heads, size]."""
    rows = query[:, :, : mask.count].permute(2, 0, 1, 3)
    if mask.has_gaps:
        rows = rows.new_zeros(mask.padded_mask.shape[0], *rows.shape[1:]).index_copy_(0, mask.slot_rows, rows)
    keys, values = (cached.narrow(2, 0, mask.length)[mask.slots] for cached in (keys, values))
    output = fn.scaled_dot_product_attention(rows, keys, values, attn_mask=mask.mask, scale=scaling)
    return (output.index_select(0, mask.slot_rows) if mask.has_gaps else output).flatten(1, 2)


def _attend_chunk(query: Tensor, keys: Tensor, values: Tensor, chunk: ChunkMask, scaling: float) -> Tensor:
    """A chunk of one slot: [KV heads, group, n, size] to [n, heads, size]."""
    heads, group, count, size = query.shape
    rows = query.reshape(1, heads, group * count, size)
    cached = slice(chunk.slot, chunk.slot + 1), slice(None), slice(chunk.length)
    output = fn.scaled_dot_product_attention(rows, keys[cached], values[cached], attn_mask=chunk.mask, scale=scaling)
    return output.view(heads, group, count, size).permute(2, 0, 1, 3).reshape(count, heads * group, size)


def _slot_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    step_context: StepContext | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention function of every layer: one packed row [1, heads, tokens, size] to [1, tokens, heads, size]."""
    del attention_mask, unused
    if step_context is None:
        raise RuntimeError("a model with slot attention runs only in the engine; load another copy to run it alone")
    layer = int(module.layer_idx)
    cache, mask = step_context.self_attention
    if cache.has_layer(layer):
        cache.write(layer, step_context.cache_rows, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return attend(query[0], cache.layer(layer), mask, scaling)[None], None
    if step_context.cross_attention is None:
        raise RuntimeError(f"layer {layer} is a cross-attention layer, but no request of this step has images")
    image_cache, image_mask = step_context.cross_attention
    output = attend(query[0], image_cache.layer(layer), image_mask, scaling)
    return (output if step_context.has_images is None else output * step_context.has_images)[None], None


import_module("transformers").AttentionInterface.register(
    ATTENTION_NAME, _slot_attention
)  # untyped: mypy takes minutes
