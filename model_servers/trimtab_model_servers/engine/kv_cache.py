"""Keys and values of every slot: one pair of tensors a layer, allocated once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Heads of a layer: ``keys`` of keys and values, ``size`` wide, each shared by ``group`` of queries."""

    keys: int
    size: int
    group: int


class KvCache:
    """``slots`` slots of ``length`` positions for each of ``layers``, [slots, heads, length, size] each."""

    length: int

    def __init__(self, layers: Sequence[int], heads: HeadLayout, slots: int, length: int, like: Tensor) -> None:
        shape = (slots, heads.keys, length, heads.size)
        self._pairs: Mapping[int, tuple[Tensor, Tensor]] = {
            layer: (like.new_zeros(shape), like.new_zeros(shape)) for layer in layers
        }
        self._flat = {
            layer: (keys.view(-1, heads.size), values.view(-1, heads.size))
            for layer, (keys, values) in self._pairs.items()
        }
        self._heads = torch.arange(heads.keys, device=like.device)
        self.length = length

    def holds(self, layer: int) -> bool:
        """Whether a layer's keys and values lie here."""
        return layer in self._pairs

    def pair(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [slots, heads, length, size] each."""
        return self._pairs[layer]

    def rows(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Where keys and values of tokens at ``positions`` [tokens] of ``slots`` [tokens] lie, [tokens * heads].

        One position on is one row on.
        """
        firsts = (slots[:, None] * len(self._heads) + self._heads) * self.length
        return (firsts + positions[:, None]).flatten()

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put [tokens, heads, size] each where ``rows`` says."""
        own_keys, own_values = self._flat[layer]
        own_keys.index_copy_(0, rows, keys.reshape(-1, keys.shape[-1]))
        own_values.index_copy_(0, rows, values.reshape(-1, values.shape[-1]))

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first ``count`` positions of a slot to another."""
        for pair in self._pairs.values():
            for tensor in pair:
                tensor[target, :, :count] = tensor[source, :, :count]

    def clear(self, slot: int) -> None:
        """Wipe a slot whose numbers may be no numbers: what is masked still counts when it is NaN."""
        for pair in self._pairs.values():
            for tensor in pair:
                tensor[slot].zero_()
