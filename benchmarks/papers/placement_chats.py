"""Chats of the placement benchmark: sent when they are due to an OpenAI API, and the highest rate that meets an SLO."""

import asyncio
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from benchmarks.harness.serving import Holds, search_goodput
from trimtab_loadtester.chat_client import ChatClient
from trimtab_loadtester.multimodal.traffic import IMAGE_SHARE, Traffic, draw
from trimtab_loadtester.payloads.lmm_digits import ChatPayloads

PATIENCE_SECONDS: Final = 30.0
MIN_IN_TIME: Final = 0.99
STEP_SECONDS: Final = 4.0
FIRST_RPS, MAX_RPS = 8.0, 400.0
BURST_OVER_CALM: Final = 5.0
"""Chats with images in a burst over those out of it, as in the trace's bursts."""
TURN_SECONDS, TURNS = 2.0, 4
"""Calm and burst take turns."""
POOL: Final = 96
CHATS_ALONE: Final = 40
"""Chats of each kind that are sent one after another to measure what one takes alone."""


@dataclass(frozen=True, slots=True)
class ChatSlo:
    """Targets of the time to the first token and of the time per output token."""

    first_token_seconds: float
    per_token_seconds: float

    def times(self, factor: float) -> "ChatSlo":
        return ChatSlo(factor * self.first_token_seconds, factor * self.per_token_seconds)


LAX: Final = ChatSlo(3.0, 0.5)
"""For measurements of latency: nothing is dropped."""


@dataclass(frozen=True, slots=True)
class ChatResult:
    """Response to a chat."""

    code: str = "200"
    """"200" of a complete stream."""
    first_seconds: float = math.inf
    """To the first token, from when the chat was due; infinity without a complete stream."""
    token_seconds: float = 0.0
    """Mean between two events with text; 0 with fewer than two."""
    ended_at: float = 0.0
    """Seconds of the performance counter."""

    @property
    def complete(self) -> bool:
        return self.code == "200"

    def meets(self, slo: ChatSlo) -> bool:
        return self.first_seconds <= slo.first_token_seconds and self.token_seconds <= slo.per_token_seconds


@dataclass(frozen=True, slots=True)
class ChatSender:
    """Client of one pipeline."""

    client: ChatClient

    async def send(self, body: bytes, due: float | None = None) -> ChatResult:
        """Send one chat and read the response to its end; no error is raised."""
        sent_at = time.perf_counter()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                response = await self.client.send(body)
        except TimeoutError:
            return ChatResult("Timeout", ended_at=time.perf_counter())
        ended_at, timings = time.perf_counter(), response.stream_timings
        if response.code != "200" or timings is None:
            return ChatResult(response.code, ended_at=ended_at)
        first_seconds = timings.first_token_seconds + (sent_at - due if due else 0.0)
        return ChatResult("200", first_seconds, float(np.nan_to_num(timings.between_tokens_seconds)), ended_at)

    async def send_at_rate(
        self, chats: Sequence[bytes], rps: float, seconds: float, *, seed: int = 0
    ) -> list[ChatResult]:
        """Send chats at random times, `rps` a second on average, and wait for all."""
        random = np.random.default_rng([int(1000 * rps) + len(chats), seed])
        times = np.cumsum(random.exponential(1 / rps, size=max(int(rps * seconds), 1)))
        return await self.send_at([(at, chats[number % len(chats)]) for number, at in enumerate(times)])

    async def send_at(self, due: Sequence[tuple[float, bytes]]) -> list[ChatResult]:
        """Send each chat when it is due, in seconds from now; the results are in their order."""
        began, tasks = time.perf_counter() + 0.05, []
        for at, body in due:
            await asyncio.sleep(max(began + at - time.perf_counter(), 0))
            tasks.append(asyncio.create_task(self.send(body, began + at)))
        return await asyncio.gather(*tasks)

    def make_chats(self, images: int, count: int, *, seed: int) -> list[bytes]:
        """Return distinct streamed chats with so many images."""
        source = ChatPayloads(seed)
        return [self.client.encode(source.chat_with_images(index, images).inputs, (), {}) for index in range(count)]


async def search_chat_rps(holds: Holds) -> float:
    """Return the highest rate, chats a second, that holds in one of two tries; 0 if none does."""
    return await search_goodput(partial(holds_once_of_two, holds), FIRST_RPS, MAX_RPS)


async def holds_once_of_two(holds: Holds, rps: float) -> bool:
    """Return whether a rate holds in one of two tries: a shared machine stalls now and then."""
    return await holds(rps) or await holds(rps)


def steady_load(sender: ChatSender, slo: ChatSlo, images: int) -> Holds:
    """Return the trial of a steady rate of chats that all have so many images."""
    chats = sender.make_chats(images, 64, seed=70 + images)

    async def holds(rps: float) -> bool:
        results = await sender.send_at_rate(chats, rps, STEP_SECONDS)
        return in_time_share(results, slo) >= MIN_IN_TIME

    return holds


def in_time_share(results: Sequence[ChatResult], slo: ChatSlo) -> float:
    """Return the share of chats that meet an SLO; 1 without chats."""
    return statistics.fmean(result.meets(slo) for result in results) if results else 1.0


def mixed_load(sender: ChatSender, slos: Sequence[ChatSlo], images: int) -> Holds:
    """Return the trial of text-only chats at one rate and image chats in bursts, each kind with an SLO of its own.

    As in the traffic of a cluster, 47 of 100 chats have images on average. 99 of 100 of each kind must be in time.
    """
    pools = {count: sender.make_chats(count, POOL, seed=88 + count) for count in (0, images)}

    async def holds(rps: float) -> bool:
        requests = draw(bursty_traffic(rps), seed=int(1000 * rps), images=images)
        due = [(each.arrival_seconds, pools[each.images][number % POOL]) for number, each in enumerate(requests)]
        results = await sender.send_at(due)
        kinds: tuple[list[ChatResult], list[ChatResult]] = ([], [])
        for result, request in zip(results, requests, strict=True):
            kinds[bool(request.images)].append(result)
        return min(in_time_share(kind, slo) for kind, slo in zip(kinds, slos, strict=True)) >= MIN_IN_TIME

    return holds


def bursty_traffic(rps: float) -> Traffic:
    """Return calm and burst in turns, with so many chats a second on average."""
    burst = np.arange(TURNS) % 2 == 1
    times = np.where(burst, BURST_OVER_CALM, 1.0)
    image_rps = rps * IMAGE_SHARE * times / times.mean()
    return Traffic(np.full(TURNS, rps * (1 - IMAGE_SHARE)), image_rps, burst, TURN_SECONDS)


async def measure_alone(sender: ChatSender, images: int) -> ChatSlo:
    """Return the median latencies of a chat that is alone: SLOs are multiples of them (ModServe, section 5.1).

    Raises RuntimeError if no chat was answered with several tokens.
    """
    chats = sender.make_chats(images, CHATS_ALONE, seed=87)
    results = [result for body in chats if (result := await sender.send(body)).complete]
    intervals = [result.token_seconds for result in results if result.token_seconds]
    if not intervals:
        raise RuntimeError(f"none of {CHATS_ALONE} chats was answered with several tokens")
    return ChatSlo(statistics.median(result.first_seconds for result in results), statistics.median(intervals))
