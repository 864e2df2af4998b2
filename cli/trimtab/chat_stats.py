"""When answers to chats began and how fast they went on: of chats with images, and of those without. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from trimtab.local.router_client import Counters, median_and_p99

KINDS: Final[Mapping[str, str]] = {"text": "chats without images", "image": "chats with images"}
"""What people read, by the modality that metrics and records name."""


@dataclass(frozen=True, slots=True)
class ChatStats:
    """Chats of one modality whose answers were told piece by piece; NaN where nothing was measured.

    Attributes:
        answered: how many answers began.
        in_time_fraction: of those received, the share answered in time; by a router alone it is not known by modality.
        first_p50_seconds, first_p99_seconds: until the first piece.
        next_p50_seconds, next_p99_seconds: from one piece to the next; on average of an answer where our load asked,
            else each.
    """

    answered: int
    in_time_fraction: float
    first_p50_seconds: float
    first_p99_seconds: float
    next_p50_seconds: float
    next_p99_seconds: float


def chat_stats(counters: Counters, modality: str) -> ChatStats:
    """Chats of a modality as a router counted them since its start, times by the edges of its buckets."""
    first, following = counters.first_token_buckets[modality], counters.next_token_buckets.get(modality, {})
    return ChatStats(int(max(first.values())), math.nan, *median_and_p99(first), *median_and_p99(following))
