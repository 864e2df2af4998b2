"""SLOs of chats: multiples of the latency of one chat of each kind alone, served colocated (ModServe, section 5.1).

Promises in seconds would be lax on a fast machine, and more than any layout can keep on a slow one.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.layouts.asking import Asker, ChatResult, chats
from benchmarks.layouts.served import Promise

ALONE: Final = 40
"""Chats of each kind that are asked one after another."""


@dataclass(frozen=True, slots=True)
class Promises:
    """What chats without images are promised, and those with some."""

    words: Promise
    images: Promise

    def times(self, factor: float) -> "Promises":
        """So many times as long."""
        return Promises(self.words.times(factor), self.images.times(factor))

    def kept(self, told: Sequence[ChatResult], images: Sequence[int]) -> dict[str, float]:
        """Of each kind that share whose promise was kept; 1 of a kind that nobody asked."""
        kinds = {"words": self.words, "images": self.images}
        kept: dict[str, list[bool]] = {kind: [] for kind in kinds}
        for one, shown in zip(told, images, strict=True):
            kind = "images" if shown else "words"
            kept[kind].append(one.kept(kinds[kind]))
        return {kind: statistics.fmean(found) if found else 1.0 for kind, found in kept.items()}


async def alone(asker: Asker) -> Promises:
    """What a chat takes that is alone: one without an image, and one with one.

    Raises:
        RuntimeError: none of a kind was answered in words.
    """
    words, images = [await _taken(asker, shown) for shown in (0, 1)]
    return Promises(words, images)


async def _taken(asker: Asker, images: int) -> Promise:
    told = [await asker.ask(body, answer) for body, answer in chats(asker.model, images, ALONE, seed=87)]
    firsts = [one.first_seconds for one in told if one.whole and one.first_seconds is not None]
    paces = [one.token_seconds for one in told if one.pieces > 1]
    if not firsts or not paces:
        raise RuntimeError(f"none of {ALONE} chats was answered in several words; the first: {told[0]}")
    return Promise(statistics.median(firsts), statistics.median(paces))
