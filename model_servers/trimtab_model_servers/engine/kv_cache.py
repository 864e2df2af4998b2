"""`KvCache`: the KV cache of every slot, one pair of tensors per layer, allocated once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Attention heads of a layer (grouped-query attention)."""

    kv_heads: int
    head_size: int
    group_size: int
    """Query heads that share one KV head."""


class KvCache:
    """Keys and values of ``slots`` slots of ``length`` positions, [slots, heads, length, size] per layer."""

    def __init__(self, layers: Sequence[int], heads: HeadLayout, slots: int, length: int, like: Tensor) -> None:
        shape = (slots, heads.kv_heads, length, heads.head_size)
        self._layers: Mapping[int, tuple[Tensor, Tensor]] = {
            layer: (like.new_zeros(shape), like.new_zeros(shape)) for layer in layers
        }
        self._flat_layers = {
            layer: (keys.view(-1, heads.head_size), values.view(-1, heads.head_size))
            for layer, (keys, values) in self._layers.items()
        }
        self._heads = torch.arange(heads.kv_heads, device=like.device)
        self.length = length

    def has_layer(self, layer: int) -> bool:
        return layer in self._layers

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [slots, heads, length, size] each."""
        return self._layers[layer]

    def row_indices(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Rows [tokens * heads] of the flattened cache for ``positions`` of ``slots``; the next position is row + 1."""
        first_rows = (slots[:, None] * len(self._heads) + self._heads) * self.length
        return (first_rows + positions[:, None]).flatten()

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [tokens, heads, size] to ``rows``."""
        flat_keys, flat_values = self._flat_layers[layer]
        flat_keys.index_copy_(0, rows, keys.reshape(-1, keys.shape[-1]))
        flat_values.index_copy_(0, rows, values.reshape(-1, values.shape[-1]))

    def copy_prefix(self, source: int, target: int, count: int) -> None:
        """Copy the first ``count`` positions of a slot to another."""
        for pair in self._layers.values():
            for tensor in pair:
                tensor[target, :, :count] = tensor[source, :, :count]

    def clear_slot(self, slot: int) -> None:
        """Zero a slot that may hold NaN, which would pass through the attention mask."""
        for pair in self._layers.values():
            for tensor in pair:
                tensor[slot].zero_()
