"""Attention masks of one step: the KV positions that each token attends to, as masks and slices of a KV cache.

They are computed once a step, for all layers. If a step decodes the same requests as the step before,
``DecodeMask.advance`` only unmasks one more position per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PositionArray = NDArray[np.int64]

_PADDING_STEP: Final = 64
"""The width of a decode mask is rounded up to a multiple of this, so that it can advance in place."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeMask:
    """Mask of the leading tokens of a step, each of which is alone in its slot."""

    count: int
    slots: slice | Tensor
    """Slots attended to: a contiguous range, read in place, or indices, which are gathered."""
    slot_rows: Tensor
    """Row of each token's slot among ``slots``, int64 [count]."""
    length: int
    """Positions attended to."""
    padded_mask: Tensor
    """0 at positions that a slot's token attends to, else -inf; [slots, at least ``length``]."""
    mask: Tensor
    """The first ``length`` columns of ``padded_mask``, [slots, 1, 1, length]."""

    @property
    def has_gaps(self) -> bool:
        """Whether ``slots`` contains slots without a token."""
        return self.padded_mask.shape[0] != self.count

    def advance(self, positions: Tensor) -> "DecodeMask | None":
        """The mask of the same requests at ``positions`` [count], one further; None if the padding is used up.

        ``padded_mask`` is changed in place.
        """
        if self.length == self.padded_mask.shape[1]:
            return None
        self.padded_mask.index_put_((self.slot_rows, positions), self.padded_mask.new_zeros(()))
        length = self.length + 1
        return replace(self, length=length, mask=_leading_columns(self.padded_mask, length))


@dataclass(frozen=True, slots=True, eq=False)
class ChunkMask:
    """Mask of the tokens ``start`` to ``end`` of a step, a prefill chunk of one slot."""

    start: int
    end: int
    slot: int
    length: int
    """Positions attended to."""
    mask: Tensor
    """[group * tokens, length]"""


@dataclass(frozen=True, slots=True, eq=False)
class StepMask:
    """Attention mask of a step over one KV cache."""

    decode: DecodeMask | None
    chunks: tuple[ChunkMask, ...]


def step_mask(
    slots: PositionArray,
    ranges: tuple[PositionArray, PositionArray],
    decodes: int,
    chunks: Sequence[tuple[int, int]],
    *,
    group: int,
    like: Tensor,
) -> StepMask:
    """Compute the mask of a step, in the dtype and on the device of ``like``.

    Slots and ranges, the first position each token attends to and one past the last, are [tokens]. The first
    ``decodes`` tokens are each alone in their slot, and ascending; ``chunks`` are (start, end) of the others. ``group``
    is the number of query heads per KV head.
    """
    low, high = ranges
    decode = _decode_mask(slots[:decodes], low[:decodes], high[:decodes], like) if decodes else None
    chunk_masks = []
    for start, end in chunks:
        length = int(high[start:end].max())
        mask = _range_mask(low[start:end], high[start:end], length, like)
        chunk_masks.append(ChunkMask(start, end, int(slots[start]), length, mask.repeat(group, 1)))
    return StepMask(decode, tuple(chunk_masks))


def _decode_mask(slots: PositionArray, low: PositionArray, high: PositionArray, like: Tensor) -> DecodeMask:
    """Read slots in place if they fill at least half of their range: gathering costs more than idle rows."""
    first, last, count = int(slots[0]), int(slots[-1]) + 1, len(slots)
    length = int(high.max())
    width = (length // _PADDING_STEP + 1) * _PADDING_STEP
    if last - first > 2 * count:
        rows, padded_mask = torch.arange(count, device=like.device), _range_mask(low, high, width, like)
        indices = torch.from_numpy(slots).to(like.device)
        return DecodeMask(count, indices, rows, length, padded_mask, _leading_columns(padded_mask, length))
    offsets, lows, highs = slots - first, np.zeros(last - first, np.int64), np.ones(last - first, np.int64)
    lows[offsets], highs[offsets] = low, high
    padded_mask = _range_mask(lows, highs, width, like)
    rows = torch.from_numpy(offsets).to(like.device)
    return DecodeMask(count, slice(first, last), rows, length, padded_mask, _leading_columns(padded_mask, length))


def _leading_columns(padded_mask: Tensor, length: int) -> Tensor:
    """Copy the first columns of [rows, width]: every layer reads them, and contiguous memory is read faster."""
    return padded_mask[:, None, None, :length].contiguous()


def _range_mask(low: PositionArray, high: PositionArray, width: int, like: Tensor) -> Tensor:
    """0 at positions in a row's range, else -inf; [rows, width]."""
    positions = np.arange(width)
    visible = (positions >= low[:, None]) & (positions < high[:, None])
    return torch.from_numpy(np.where(visible, np.float32(0), np.float32(-np.inf))).to(like)
