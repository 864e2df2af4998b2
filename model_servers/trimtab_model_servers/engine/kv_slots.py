"""Which slot of keys and values belongs to whom, and which prefix of a prompt lies in one already. Pure.

A slot holds one request's keys and values, position by position. A freed slot keeps what it holds until it is given
away: a later prompt that begins alike takes it over, or copies from it, and computes the rest only. Taken over is what
it mostly holds in common; else a first word in common would cost who comes back his whole prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimtab_model_servers.engine.request import PositionKeys


@dataclass(frozen=True, slots=True)
class SlotLease:
    """A slot given to a request.

    Attributes:
        slot: its number.
        reused: how many positions of the prompt lie in it, or will once copied.
        source: the slot they are copied from; None where they lie in it already.
    """

    slot: int
    reused: int
    source: int | None


@dataclass(slots=True)
class _Slot:
    """``places`` has room for a slot's every position; the first ``held`` are taken."""

    places: PositionKeys
    held: int = 0
    space: str = ""
    busy: bool = False
    stamp: int = 0

    @property
    def keys(self) -> PositionKeys:
        return self.places[: self.held]

    def add(self, keys: PositionKeys | Sequence[int]) -> None:
        self.places[self.held : self.held + len(keys)] = keys
        self.held += len(keys)


class KvSlotManager:
    """Gives and takes back ``slots`` slots of ``length`` positions each."""

    def __init__(self, slots: int, length: int, *, share_prefixes: bool = True) -> None:
        self.length = length
        self._slots = [_Slot(np.zeros(length, np.int64), stamp=number) for number in range(slots)]
        self._stamp = slots
        self._share = share_prefixes

    @property
    def busy(self) -> int:
        """How many slots are given away."""
        return sum(slot.busy for slot in self._slots)

    def take(self, prompt: PositionKeys, space: str) -> SlotLease | None:
        """Give a slot for ``prompt``; None when all are busy.

        At least the prompt's last position is left to compute, since its logits are wanted. Prefixes are found among
        slots of the same ``space`` only: the tenant, and where keys and values depend on the images ahead, those too.
        """
        free = [number for number, slot in enumerate(self._slots) if not slot.busy]
        if not free:
            return None
        best, reused = self._longest(prompt, space)
        chosen = min(free, key=lambda number: self._slots[number].stamp)
        if best in free and len(self._slots[best].keys) <= 2 * reused:
            chosen = best
        slot = self._slots[chosen]
        slot.busy, slot.space, slot.held = True, space, 0
        slot.add(prompt[:reused])
        return SlotLease(chosen, reused, best if best != chosen else None)

    def wrote(self, slot: int, keys: PositionKeys | Sequence[int]) -> None:
        """Note what the next positions of a slot hold now."""
        self._slots[slot].add(keys)

    def free(self, slot: int, *, forget: bool = False) -> None:
        """Take a slot back; ``forget`` what it holds where that may be wrong."""
        own = self._slots[slot]
        own.busy, own.stamp = False, self._stamp
        self._stamp += 1
        if forget:
            own.held = 0

    def _longest(self, prompt: PositionKeys, space: str) -> tuple[int | None, int]:
        best, reused = None, 0
        if not self._share:
            return best, reused
        for number, slot in enumerate(self._slots):
            if slot.space == space and (common := _common(slot.keys, prompt[:-1])) > reused:
                best, reused = number, common
        return best, reused


def _common(one: PositionKeys, other: PositionKeys) -> int:
    """Length of the longest prefix both share."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
