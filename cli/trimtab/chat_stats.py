"""Token latencies of chats, by modality."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from trimtab.local.router_client import Counters, median_and_p99

CHAT_LABELS: Final[Mapping[str, str]] = {"text": "text-only chats", "image": "chats with images"}
"""Labels of the modalities that metrics and records name."""


@dataclass(frozen=True, slots=True)
class ChatStats:
    """Streamed chats of one modality; NaN if nothing was measured.

    Times between tokens are means of responses in a load test's results, and single times in a router's counters.
    """

    answered: int
    in_time_fraction: float
    """Share of received requests answered within the SLO; a router does not count it by modality."""
    first_token_p50_seconds: float
    first_token_p99_seconds: float
    next_token_p50_seconds: float
    next_token_p99_seconds: float


def chat_stats(counters: Counters, modality: str) -> ChatStats:
    """Compute the statistics from a router's counters, with quantiles rounded up to bucket edges."""
    first, following = counters.first_token_buckets[modality], counters.next_token_buckets.get(modality, {})
    return ChatStats(int(max(first.values())), math.nan, *median_and_p99(first), *median_and_p99(following))
