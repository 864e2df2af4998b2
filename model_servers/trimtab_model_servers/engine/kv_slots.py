"""`KvSlotManager`: assigns KV slots to requests and finds cached prefixes.

A slot holds the keys and values of one request, position by position. A released slot keeps its content until it is
assigned again: a later prompt with the same prefix reuses the slot, or copies the prefix from it, and computes only the
rest. A slot is reused only if most of its content matches; otherwise a one-token match would evict the full prefix of a
returning conversation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimtab_model_servers.engine.request import PositionKeys


@dataclass(frozen=True, slots=True)
class SlotLease:
    """A slot assigned to a request."""

    slot: int
    reused_tokens: int
    """Positions of the prompt that are cached in the slot, or will be once copied."""
    copy_from: int | None
    """Slot to copy the prefix from; None if the slot holds it already."""


@dataclass(slots=True)
class _Slot:
    buffer: PositionKeys
    """Keys of all positions of the slot; the first ``length`` are valid."""
    length: int = 0
    namespace: str = ""
    busy: bool = False
    released_at: int = 0
    """Logical time of the last release."""

    @property
    def keys(self) -> PositionKeys:
        return self.buffer[: self.length]

    def append(self, keys: PositionKeys | Sequence[int]) -> None:
        self.buffer[self.length : self.length + len(keys)] = keys
        self.length += len(keys)


class KvSlotManager:
    """Owns ``slots`` slots of ``length`` positions each."""

    def __init__(self, slots: int, length: int, *, share_prefixes: bool = True) -> None:
        self.length = length
        self._slots = [_Slot(np.zeros(length, np.int64), released_at=number) for number in range(slots)]
        self._releases = slots
        self._share_prefixes = share_prefixes

    @property
    def busy(self) -> int:
        return sum(slot.busy for slot in self._slots)

    def acquire(self, prompt: PositionKeys, namespace: str) -> SlotLease | None:
        """Assign a slot to ``prompt``; None if all are busy.

        The last position of the prompt is never reused, because its logits are needed. Prefixes are shared only within
        a ``namespace``: the tenant, and the images if keys and values depend on images that follow.
        """
        free = [number for number, slot in enumerate(self._slots) if not slot.busy]
        if not free:
            return None
        best, reused = self._longest_prefix(prompt, namespace)
        chosen = min(free, key=lambda number: self._slots[number].released_at)
        if best in free and len(self._slots[best].keys) <= 2 * reused:
            chosen = best
        slot = self._slots[chosen]
        slot.busy, slot.namespace, slot.length = True, namespace, 0
        slot.append(prompt[:reused])
        return SlotLease(chosen, reused, best if best != chosen else None)

    def record(self, slot: int, keys: PositionKeys | Sequence[int]) -> None:
        self._slots[slot].append(keys)

    def release(self, slot: int, *, invalidate_prefix: bool = False) -> None:
        """Take a slot back; with ``invalidate_prefix`` its content is never reused."""
        released = self._slots[slot]
        released.busy, released.released_at = False, self._releases
        self._releases += 1
        if invalidate_prefix:
            released.length = 0

    def _longest_prefix(self, prompt: PositionKeys, namespace: str) -> tuple[int | None, int]:
        best, reused = None, 0
        if not self._share_prefixes:
            return best, reused
        for number, slot in enumerate(self._slots):
            if slot.namespace == namespace and (common := _common_prefix(slot.keys, prompt[:-1])) > reused:
                best, reused = number, common
        return best, reused


def _common_prefix(left: PositionKeys, right: PositionKeys) -> int:
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length
