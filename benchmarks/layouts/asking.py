"""Chats asked at the OpenAI door when they are due, whatever is outstanding, and what became of each."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import numpy as np

from benchmarks.layouts.served import FORGIVING, Promise
from trimtab_loadtester.chat_client import ChatClient
from trimtab_loadtester.clients import OPEN
from trimtab_loadtester.payloads.lmm_digits import ChatPayloads

PATIENCE_SECONDS: Final = 30.0


@dataclass(slots=True)
class ChatResult:
    """What one caller was told; times in seconds from when the chat was due.

    `first_seconds` is None where no word came: a refusal is no word, however soon it is told.
    """

    status: int = 0
    text: str = ""
    first_seconds: float | None = None
    last_seconds: float = 0.0
    pieces: int = 0
    whole: bool = False
    error: str = ""
    ended_at: float = 0.0
    right: bool = False

    @property
    def token_seconds(self) -> float:
        """Between two pieces, on average."""
        if self.first_seconds is None or self.pieces < 2:
            return 0.0
        return (self.last_seconds - self.first_seconds) / (self.pieces - 1)

    def kept(self, promise: Promise) -> bool:
        """Whether a promise was."""
        first = self.first_seconds if self.first_seconds is not None else float("inf")
        return self.whole and first <= promise.first_token_seconds and self.token_seconds <= promise.per_token_seconds


@dataclass(slots=True)
class Asker:
    """Asks one door, which promises something."""

    port: int
    model: str
    session: aiohttp.ClientSession
    promise: Promise = FORGIVING
    told: list[ChatResult] = field(default_factory=list)

    async def ask(self, body: dict[str, Any], answer: str = "", due: float | None = None) -> ChatResult:
        """Ask one chat and hear it to its end; whatever happens is told."""
        told, due = ChatResult(), time.perf_counter() if due is None else due
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        content = json.dumps(body).encode()
        try:
            asked = self.session.post(url, data=content, headers={"Content-Type": "application/json"})
            async with asyncio.timeout(PATIENCE_SECONDS), asked as response:
                told.status = response.status
                if response.status != 200 or not body.get("stream"):
                    _whole(told, await response.read())
                    told.first_seconds = time.perf_counter() - due if told.whole else None
                else:
                    await _stream(told, response, due)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            told.error = told.error or f"{type(error).__name__}: {error}"
        told.ended_at = time.perf_counter()
        told.right = told.whole and told.text.strip() == answer.strip()
        self.told.append(told)
        return told

    async def at_rate(
        self, bodies: Sequence[tuple[dict[str, Any], str]], rps: float, seconds: float, *, seed: int = 0
    ) -> list[ChatResult]:
        """Ask at random moments, ``rps`` of them a second on average, and wait for all."""
        random = np.random.default_rng([int(1000 * rps) + len(bodies), seed])
        moments = np.cumsum(random.exponential(1 / rps, size=max(int(rps * seconds), 1)))
        return await self.at_moments([(moment, *bodies[number % len(bodies)]) for number, moment in enumerate(moments)])

    async def at_moments(self, due: Sequence[tuple[float, dict[str, Any], str]]) -> list[ChatResult]:
        """Ask each chat when it is due, in seconds from now, in their order; the right answer stands beside it."""
        began, asked = time.perf_counter() + 0.05, []
        for moment, body, answer in due:
            await asyncio.sleep(max(began + moment - time.perf_counter(), 0))
            asked.append(asyncio.create_task(self.ask(body, answer, began + moment)))
        return await asyncio.gather(*asked)


def chats(
    model: str, images: int, count: int, *, seed: int = 61, stream: bool = True
) -> list[tuple[dict[str, Any], str]]:
    """Different chats of so many images, and the right answer of each; of more than three the first are asked about."""
    source, wire = ChatPayloads(seed), ChatClient("", model, OPEN)
    payloads = [source.chat_with_images(index, images) for index in range(count)]
    return [
        (json.loads(wire.encode(payload.inputs, (), {})) | {"stream": stream}, str(payload.truth))
        for payload in payloads
    ]


def _whole(told: ChatResult, raw: bytes) -> None:
    try:
        body = json.loads(raw)
    except ValueError:
        body = {}
    if "choices" in body:
        told.text, told.whole = body["choices"][0]["message"]["content"], True
    else:
        error = body.get("error", "")
        message = error.get("message", "") if isinstance(error, dict) else f"in another form than OpenAI's: {error}"
        told.error = str(message) or f"status {told.status} without a reason"


async def _stream(told: ChatResult, response: aiohttp.ClientResponse, due: float) -> None:
    async for line in response.content:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        said = json.loads(line.removeprefix(b"data: "))
        now = time.perf_counter() - due
        if "error" in said:
            told.error = str(said["error"]["message"])
            return
        choice = said["choices"][0]
        if choice["delta"].get("content"):
            told.first_seconds = now if told.first_seconds is None else told.first_seconds
            told.last_seconds, told.pieces = now, told.pieces + 1
            told.text += choice["delta"]["content"]
        told.whole = told.whole or bool(choice["finish_reason"])
    told.error = "" if told.whole else "the stream ended without a word"
