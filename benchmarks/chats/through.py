"""``make bench NAME=chats-routed``: what a router adds to chats that are streamed, fifty at a time.

One replica, asked by turns at its own data port, through its router, and through Envoy and its router: the same
questions from the same callers, each of whom thinks for a while once he has his answer, so that nobody asks in step
with the model. Callers stand for other machines, so they share the replica's core, whichever way they ask: beside the
router they would take from it what they do not take from a replica alone. Router and Envoy have the other core. Served
are lmm-digits' decoder-only model, whose fifty answers are thousands of words a second, and one that writes at the pace
of a large model on a GPU. How much more the 99th percentile is may be chance: between what bounds 90 % of it lie is
told beside it.
"""

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
from rich.progress import Progress

from benchmarks.chats.paced import write_model
from benchmarks.chats.replica import WEIGHTS, request_of
from benchmarks.cores import CLIENT_CORE, SERVER_CORE, pin_threads
from benchmarks.rounds import Rounds, confidence_interval, p99
from tests.local_run import chat_pipeline, chat_plan
from trimtab.app import run_reporting_errors
from trimtab.local.supervisor import Setup, Supervisor
from trimtab.options import console
from trimtab_pipelines.documents import write_json
from trimtab_pipelines.endpoints import Endpoints
from trimtab_pipelines.result_line import ResultLine, Threshold, threshold
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol.rest import HEADER_LENGTH, encode_request
from trimtab_training.lmm_digits.chat_samples import Chat, ChatSource

STREAMS: Final = 50
CALLERS, THINKING_SECONDS = 70, 0.25
"""Of whom about fifty are being answered."""
SLOTS, SLOT_TOKENS = 72, 400
SMALL, PACED = "small model", "large model's pace"
WORDS: Final = {SMALL: (50, 150), PACED: (20, 40)}
"""Of an answer, at least and at most."""
ALONE, ROUTED, FRONTED = "alone", "routed", "behind Envoy"
_WORDS: Final = re.compile(rb'"(text|content)": ?"[^"]')
"""In a piece that has any: half a letter has none yet."""
DIFFERENCE_MS, DIFFERENCE_SHARE, CHUNK_MS = 2.0, 0.05, 1.0


@dataclass(slots=True)
class Heard:
    """In one manner: seconds to each answer's first word, of all answers together, pieces, the router's own time."""

    first_seconds: list[float] = field(default_factory=list)
    round_ends: list[int] = field(default_factory=list)
    """How many there were once each round was over."""
    answering_seconds: float = 0.0
    pieces: int = 0
    router_seconds: float = 0.0
    wall_seconds: float = 0.0
    wordless: int = 0
    """Answers that ended without a word: a stream that tells an error alone."""

    def first_ms(self, quantile: float) -> float:
        """A quantile of the time to the first word; infinite where nobody heard one."""
        if not self.first_seconds:
            return inf
        return round(1e3 * float(np.quantile(self.first_seconds, quantile)), 2)

    @property
    def rounds(self) -> Rounds:
        """Seconds to the first words of each round's answers."""
        return np.split(np.array(self.first_seconds), self.round_ends[:-1])

    @property
    def router_ms(self) -> float:
        """The router's own time a piece, milliseconds; infinite where nobody heard one."""
        return 1e3 * self.router_seconds / self.pieces if self.pieces else inf


@dataclass(frozen=True, slots=True)
class Way:
    """One manner of asking: where a chat goes to, and as what."""

    url: str
    model: str
    session: aiohttp.ClientSession
    inner: bool
    words: tuple[int, int]

    def post(self, chat: Chat, words: int) -> Any:
        """Ask for a stream of so many words."""
        if self.inner:
            buffers, length = encode_request(request_of(chat, self.model, max_tokens=words, ignore_eos=True))
            return self.session.post(self.url, data=b"".join(buffers), headers={HEADER_LENGTH: str(length)})
        asked = {"model": self.model, "messages": json.loads(chat.messages), "max_tokens": words}
        return self.session.post(self.url, json=asked | {"ignore_eos": True, "stream": True})


async def listen(way: Way, chat: Chat, words: int, heard: Heard, *, counts: bool) -> None:
    """Ask once, and note when the first word came, and the last; an answer without one is counted apart."""
    began, first = time.perf_counter(), 0.0
    async with way.post(chat, words) as answer:
        answer.raise_for_status()
        async for chunk in answer.content.iter_any():
            first = first or (time.perf_counter() if _WORDS.search(chunk) else 0.0)
            heard.pieces += chunk.count(b"data: ")
    heard.answering_seconds += time.perf_counter() - began
    if not first:
        heard.wordless += 1
    elif counts:
        heard.first_seconds.append(first - began)


async def streams(way: Way, seconds: float, seed: int, heard: Heard, router: int) -> None:
    """Callers for some seconds; answers that began in the first quarter, all at once, are only let pass by."""
    source, random = ChatSource(seed, pages=(0, 0)), np.random.default_rng(seed)
    began, spent, number = time.perf_counter(), cpu_seconds(router), iter(range(10**9))

    async def caller() -> None:
        while (since := time.perf_counter() - began) < seconds:
            await asyncio.sleep(random.exponential(THINKING_SECONDS))
            words = int(random.integers(*way.words, endpoint=True))
            await listen(way, source.chat(next(number)), words, heard, counts=since > seconds / 4)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    heard.router_seconds += cpu_seconds(router) - spent
    heard.wall_seconds += time.perf_counter() - began
    heard.round_ends.append(len(heard.first_seconds))


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


@asynccontextmanager
async def serving(model: str, *, fronted: bool) -> AsyncIterator[Supervisor]:
    """A model in one replica, on the core of whoever asks, behind a router that has the other."""
    with tempfile.TemporaryDirectory(prefix="trimtab-through-") as name:
        pipeline = _pipeline(model, Path(name) / "model")
        file = Path(name) / "pipeline.yaml"
        write_json(file, pipeline)
        async with Supervisor(Setup(file, Path(name) / "run", plan=chat_plan(pipeline), proxy=fronted)) as local:
            await local.ready()
            for pid in (*local.replica_manager.pids.values(), os.getpid()):
                pin_threads(pid, {SERVER_CORE})
            try:
                yield local
            finally:
                pin_threads(os.getpid(), {CLIENT_CORE})


def _pipeline(model: str, folder: Path) -> InferencePipeline:
    if model == PACED:
        family = write_model(folder)
        return chat_pipeline(slots=SLOTS, slot_tokens=SLOT_TOKENS, weights=str(folder), family=family, size="tiny")
    weights = str((WEIGHTS / "decoder-only.safetensors").resolve())
    return chat_pipeline(slots=SLOTS, slot_tokens=SLOT_TOKENS, weights=weights)


async def compared(served: str, name: str, rounds: int, seconds: float, progress: Progress) -> dict[str, Heard]:
    """Ask a replica alone and in another manner, by turns."""
    heard = {ALONE: Heard(), name: Heard()}
    task = progress.add_task(f"{served}, {STREAMS} streams, {name}", total=2 * rounds)
    async with serving(served, fronted=name == FRONTED) as local, AsyncExitStack() as stack:
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        listed = Endpoints.model_validate_json(local.replica_manager.site.endpoints_file.read_bytes())
        address, model = listed.stages["answer"][0].address, local.pipeline.name
        ways = {
            ALONE: Way(f"http://{address}/v2/models/{model}/generate_stream", model, session, True, WORDS[served]),
            name: Way(f"http://127.0.0.1:{local.rest_port}/v1/chat/completions", model, session, False, WORDS[served]),
        }
        if local.router is None:
            raise RuntimeError("the router has ended")
        router = local.router.pid
        for number in range(rounds):
            for which in (ALONE, name) if number % 2 else (name, ALONE):
                await streams(ways[which], seconds, number, heard[which], router)
                progress.advance(task)
    return heard


def overhead_figures(name: str, heard: Mapping[str, Heard]) -> dict[str, float | int | str | None]:
    """Figures of one comparison."""
    alone, other = heard[ALONE], heard[name]
    figures: dict[str, float | int | str | None] = {}
    for which, one in ((f"alone, beside {name}", alone), (name, other)):
        figures[f"{which}: answers"] = len(one.first_seconds)
        figures[f"{which}: answers without a word"] = one.wordless
        figures[f"{which}: first token p50 ms"] = one.first_ms(0.5)
        figures[f"{which}: first token p99 ms"] = one.first_ms(0.99)
        figures[f"{which}: answers under way"] = round(one.answering_seconds / one.wall_seconds, 1)
        figures[f"{which}: pieces a second"] = round(one.pieces / one.wall_seconds)
    figures[f"{name}: first token p50, ms more"] = round(other.first_ms(0.5) - alone.first_ms(0.5), 2)
    figures |= {f"{name}: first token p99, ms more, {bound}": ms for bound, ms in _by_chance(alone, other).items()}
    figures[f"{name}: router, ms a piece"] = round(other.router_ms, 4)
    return figures


def _by_chance(alone: Heard, other: Heard) -> dict[str, float]:
    """Between what bounds the difference of the 99th percentiles lies; nothing where a round has no first word."""
    ones, others = alone.rounds, other.rounds
    if len(ones) != len(others) or not all(map(len, (*ones, *others))):
        return {}
    bounds = confidence_interval(lambda which: 1e3 * (p99(others, which) - p99(ones, which)), len(ones))
    return dict(zip(("low", "high"), (round(bound, 2) for bound in bounds), strict=True))


async def measure(models: Sequence[str], rounds: int, seconds: float) -> ResultLine:
    """Compare, with Envoy in front and without."""
    figures: dict[str, float | int | str | None] = {"streams": STREAMS}
    bars = []
    with Progress(console=console, transient=True) as progress:
        for model, name in product(models, (ROUTED, FRONTED)):
            heard = await compared(model, name, rounds, seconds, progress)
            figures |= {f"{model}: {key}": value for key, value in overhead_figures(name, heard).items()}
            bars += bars_of(f"{model}, {name}", heard[ALONE], heard[name])
    return ResultLine(name="chats-routed", figures=figures, bars=tuple(bars))


def bars_of(name: str, alone: Heard, other: Heard) -> list[Threshold]:
    """What one comparison is held to; without answers of both manners it holds nothing."""
    more, bound = other.first_ms(0.99) - alone.first_ms(0.99), alone.first_ms(0.99) * DIFFERENCE_SHARE
    answers = min(len(alone.first_seconds), len(other.first_seconds))
    return [
        threshold(f"{name}: answers in either manner, at least", answers, ">=", 1),
        threshold(f"{name}: answers without a word", alone.wordless + other.wordless, "==", 0),
        threshold(f"{name}: first token p99, ms more", round(more, 2), "<=", round(max(bound, DIFFERENCE_MS), 2)),
        threshold(f"{name}: processor time of the router, ms a piece", round(other.router_ms, 4), "<=", CHUNK_MS),
    ]


def main() -> int:
    """Measure and print the verdict."""
    parser = argparse.ArgumentParser(description="What a router adds to chats that are streamed, fifty at a time.")
    parser.add_argument("--model", choices=(SMALL, PACED), action="append", help="only; repeatable")
    parser.add_argument("--rounds", type=int, default=12, help="of each manner (default 12)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a round (default 6)")
    given = parser.parse_args()
    pin_threads(os.getpid(), {CLIENT_CORE})
    outcome = asyncio.run(measure(given.model or (SMALL, PACED), given.rounds, given.seconds))
    outcome.print()
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    sys.exit(run_reporting_errors(main))
