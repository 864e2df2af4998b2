"""Goodput: the highest rate at which 99 of 100 chats begin and go on as promised, found by trying rates."""

import statistics
from collections.abc import Awaitable, Callable
from typing import Any, Final

from benchmarks.layouts.asking import Asker, chats

LEAST_KEPT: Final = 0.99
STEP_SECONDS: Final = 4.0
FIRST_RPS, MOST_RPS = 8.0, 400.0
HALVINGS: Final = 4

Carried = Callable[[float], Awaitable[bool]]
"""Tries a rate, requests a second."""


async def highest(carried: Carried) -> float:
    """The highest rate that is carried, requests a second; 0 where none is that was tried."""
    low, high = 0.0, FIRST_RPS
    while high <= MOST_RPS and await once_of_two(carried, high):
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if await once_of_two(carried, middle) else (low, middle)
    return low


async def once_of_two(carried: Carried, rps: float) -> bool:
    """Whether a rate is carried in one of two tries: a machine that others use stands still now and then."""
    return await carried(rps) or await carried(rps)


async def goodput(asker: Asker, images: int) -> float:
    """Of chats that all show so many images, at random moments; requests a second."""
    return await highest(steady(asker, chats(asker.model, images, 64, seed=70 + images)))


def steady(asker: Asker, bodies: list[tuple[dict[str, Any], str]]) -> Carried:
    """Whether chats that come at one rate are answered as promised."""

    async def carried(rps: float) -> bool:
        told = await asker.at_rate(bodies, rps, STEP_SECONDS)
        return statistics.fmean(one.kept(asker.promise) for one in told) >= LEAST_KEPT

    return carried
