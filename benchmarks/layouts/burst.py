"""First words of chats without images beside a burst of chats with many, over those in calm.

Both are asked in turns, many short rounds within one run, so that whatever the machine does in the meantime falls on
both; every other round begins with the burst. In a round both see the same chats at the same moments. Who asks about
images does so in a process of its own, for else words would wait for it where they are timed. Callers stand for other
machines: who asks about images takes no core from anybody, and who times words waits for none, where that is allowed.
The 99th percentile is of all rounds together, with at least ten chats beyond it; how far it may be by chance is told by
drawing rounds again.
"""

import asyncio
import math
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any, Final

import aiohttp
import numpy as np
from numpy.typing import NDArray

from benchmarks.layouts.asking import PATIENCE_SECONDS, Asker, ChatResult, chats
from benchmarks.rounds import Rounds, by_chance, p99
from benchmarks.standing import ahead, apart_and_behind

TEXT_RPS: Final = 15.0
ROUNDS: Final = 12
ROUND_SECONDS: Final = 7.0
LEAST_BEYOND: Final = 10
"""Chats that a quantile leaves beyond it: of fewer it is one of the largest by chance."""
AHEAD, BEHIND = 10, 10
"""How much less nice who times words is, and how nice who asks about images."""


async def beside_a_burst(
    asker: Asker, burst_rps: float, images: int, *, rounds: int = ROUNDS, round_seconds: float = ROUND_SECONDS
) -> dict[str, float]:
    """The first words of chats without images, alone and while chats with many come, in turns."""
    words = chats(asker.model, 0, 64, seed=80)
    calm: list[list[ChatResult]] = []
    burst: list[list[ChatResult]] = []
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as elsewhere:
        loop = asyncio.get_running_loop()

        def ask(rps: float, seconds: float, seed: int) -> asyncio.Future[None]:
            return loop.run_in_executor(
                elsewhere, _ask_about_images, asker.port, asker.model, images, rps, seconds, seed
            )

        await ask(1.0, 1.0, 0)  # all is loaded by then
        with ahead(AHEAD):
            for number in range(rounds):
                for beside in (False, True) if number % 2 == 0 else (True, False):
                    asked = asker.at_rate(words, TEXT_RPS, round_seconds, seed=number)
                    if not beside:
                        calm.append(await asked)
                        continue
                    told, _ = await asyncio.gather(asked, ask(burst_rps, round_seconds, number))
                    burst.append(told)
    judged = over_calm([*map(first_seconds, calm)], [*map(first_seconds, burst)])
    return judged | {"unanswered": sum(not one.whole for told in (*calm, *burst) for one in told)}


def _ask_about_images(port: int, model: str, images: int, rps: float, seconds: float, seed: int) -> None:
    """In a process of its own: chats with so many images each, until all are answered."""
    apart_and_behind(BEHIND)

    async def ask() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await Asker(port, model, session).at_rate(_chats_with_images(model, images), rps, seconds, seed=seed)

    asyncio.run(ask())


@cache
def _chats_with_images(model: str, images: int) -> list[tuple[dict[str, Any], str]]:
    return chats(model, images, 64, seed=81)


def first_seconds(told: Sequence[ChatResult]) -> NDArray[np.float64]:
    """Seconds to the first word of each; a chat without an answer counts as the longest that is waited.

    That is not what was promised: where refusals take the tail of a calm time too, a burst would look no worse.
    """
    return np.array(
        [one.first_seconds if one.whole and one.first_seconds is not None else PATIENCE_SECONDS for one in told]
    )


def over_calm(calm: Rounds, burst: Rounds) -> dict[str, float]:
    """The 99th percentile beside a burst over that in calm, of all rounds together, and 90 % of what it may be.

    Chats of one round share what the machine did in it, so rounds are drawn again, not chats.

    Raises:
        ValueError: there are too few chats for such a quantile, or not as many rounds of one as of the other.
    """
    if len(calm) != len(burst):
        raise ValueError(f"each round is of both; got {len(calm)} in calm and {len(burst)} beside a burst")
    fewest = min(sum(len(one) for one in rounds) for rounds in (calm, burst))
    if 0.01 * fewest < LEAST_BEYOND:
        least = math.ceil(LEAST_BEYOND / 0.01)
        raise ValueError(
            f"a 99th percentile needs {least} chats at least; got {fewest}; ask more rounds, or longer ones"
        )
    low, high = by_chance(lambda which: p99(burst, which) / p99(calm, which), len(calm))
    every = np.arange(len(calm))
    return {
        "calm_ms": round(1e3 * p99(calm, every), 2),
        "burst_ms": round(1e3 * p99(burst, every), 2),
        "over_calm": round(p99(burst, every) / p99(calm, every), 3),
        "over_calm_low": round(low, 3),
        "over_calm_high": round(high, 3),
        "median_over_calm": round(float(np.median(np.concatenate(burst)) / np.median(np.concatenate(calm))), 3),
        "chats_each": fewest,
    }
