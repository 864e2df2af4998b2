"""Keys and values of every slot: one pair of tensors a layer, allocated once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of a layer: ``keys`` of keys and values, ``size`` wide, each shared by ``group`` of queries."""

    keys: int
    size: int
    group: int


class Store:
    """``slots`` slots of ``length`` positions for each of ``layers``, [slots, heads, length, size] each."""

    def __init__(self, layers: Sequence[int], heads: Heads, slots: int, length: int, like: Tensor) -> None:
        shape = (slots, heads.keys, length, heads.size)
        self._pairs: Mapping[int, tuple[Tensor, Tensor]] = {
            layer: (like.new_zeros(shape), like.new_zeros(shape)) for layer in layers
        }

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers it holds."""
        return tuple(self._pairs)

    @property
    def bytes(self) -> int:
        """What it takes."""
        return sum(tensor.nbytes for pair in self._pairs.values() for tensor in pair)

    def pair(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [slots, heads, length, size] each."""
        return self._pairs[layer]

    def write(self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put [tokens, heads, size] each where ``slots`` [tokens] and ``positions`` [tokens] say."""
        own_keys, own_values = self._pairs[layer]
        own_keys[slots, :, positions] = keys
        own_values[slots, :, positions] = values

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
