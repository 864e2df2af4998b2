"""When answers to chats began and how fast they went on: of chats with images, and of those without. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from trimtab.local.router_client import Counters, middle_and_tail

KINDS: Final[Mapping[str, str]] = {"text": "chats without images", "image": "chats with images"}
"""What people read, by the modality that metrics and records name."""


@dataclass(frozen=True, slots=True)
class ChatFigures:
    """Chats of one modality whose answers were told piece by piece; NaN where nothing was measured.

    Attributes:
        answered: how many answers began.
        kept_fraction: of those received, the share answered in time; by a router alone it is not known by modality.
        first_p50_seconds, first_p99_seconds: until the first piece.
        next_p50_seconds, next_p99_seconds: from one piece to the next; on average of an answer where our load asked,
            else each.
    """

    answered: int
    kept_fraction: float
    first_p50_seconds: float
    first_p99_seconds: float
    next_p50_seconds: float
    next_p99_seconds: float


def chats_counted(counters: Counters, modality: str) -> ChatFigures:
    """Chats of a modality as a router counted them since its start, times by the edges of its buckets."""
    first, following = counters.first_buckets[modality], counters.next_buckets.get(modality, {})
    return ChatFigures(int(max(first.values())), math.nan, *middle_and_tail(first), *middle_and_tail(following))
