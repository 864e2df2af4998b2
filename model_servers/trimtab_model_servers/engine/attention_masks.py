"""What the tokens of a step see in their slots: a run of positions each, as masks and as slices of a store.

Worked out once a step, for all layers. Where a step's tokens are those of the step before, one position on, it is not
worked out at all: ``DecodeTokens.moved_on`` uncovers one position a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Places = NDArray[np.int64]

_ROOM: Final = 64
"""A mask of those who write is made this much wider than it must be, so that they may move on in it."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeTokens:
    """Tokens that are each alone in their slot, the first of a step.

    Attributes:
        count: how many.
        slots: which slots are looked at: a run of them, seen where they lie, or some, which are copied together.
        rows: where in the run each token's slot lies, int64 [count].
        longest: positions looked at.
        room: 0 where a slot's token sees a position, -inf elsewhere, [slots looked at, longest or more].
        mask: its positions that are looked at, [slots looked at, 1, 1, longest].
    """

    count: int
    slots: slice | Tensor
    rows: Tensor
    longest: int
    room: Tensor
    mask: Tensor

    @property
    def spread(self) -> bool:
        """Whether slots lie between that are looked at in vain."""
        return self.room.shape[0] != self.count

    def moved_on(self, positions: Tensor) -> "DecodeTokens | None":
        """The same tokens at the next ``positions`` [count], the room changed in place; None where it has no more."""
        if self.longest == self.room.shape[1]:
            return None
        self.room.index_put_((self.rows, positions), self.room.new_zeros(()))
        longest = self.longest + 1
        return replace(self, longest=longest, mask=_begun(self.room, longest))


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Tokens from ``start`` to ``end`` of a step, all of one slot; ``mask`` is [group * tokens, longest]."""

    start: int
    end: int
    slot: int
    longest: int
    mask: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepMask:
    """What each token of a step sees in its slot's store: ``single`` those alone in their slot, ``runs`` the others."""

    single: DecodeTokens | None
    runs: tuple[Run, ...]


def step_mask(
    slots: Places,
    seen: tuple[Places, Places],
    singles: int,
    runs: Sequence[tuple[int, int]],
    *,
    group: int,
    like: Tensor,
) -> StepMask:
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
        longest = int(high[start:end].max())
        mask = _mask(low[start:end], high[start:end], longest, like)
        made.append(Run(start, end, int(slots[start]), longest, mask.repeat(group, 1)))
    return StepMask(single, tuple(made))


def _single_of(slots: Places, low: Places, high: Places, like: Tensor) -> DecodeTokens:
    """Look at slots where they lie if half of the run they lie in is theirs: copying costs more than idling."""
    first, last, count = int(slots[0]), int(slots[-1]) + 1, len(slots)
    longest = int(high.max())
    wide = (longest // _ROOM + 1) * _ROOM
    if last - first > 2 * count:
        every, room = torch.arange(count, device=like.device), _mask(low, high, wide, like)
        some = torch.from_numpy(slots).to(like.device)
        return DecodeTokens(count, some, every, longest, room, _begun(room, longest))
    rows, lows, highs = slots - first, np.zeros(last - first, np.int64), np.ones(last - first, np.int64)
    lows[rows], highs[rows] = low, high
    room = _mask(lows, highs, wide, like)
    at = torch.from_numpy(rows).to(like.device)
    return DecodeTokens(count, slice(first, last), at, longest, room, _begun(room, longest))


def _begun(room: Tensor, longest: int) -> Tensor:
    """The first columns of [rows, wide] as a mask of its own: each layer reads it, and it is read faster in one run."""
    return room[:, None, None, :longest].contiguous()


def _mask(low: Places, high: Places, wide: int, like: Tensor) -> Tensor:
    """0 where a row sees a position and -inf elsewhere, [rows, wide]."""
    places = np.arange(wide)
    seen = (places >= low[:, None]) & (places < high[:, None])
    return torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf))).to(like)
