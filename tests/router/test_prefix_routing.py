"""Conversations at simulated engines with prefix caches: where their next turns go, and what that saves."""

import heapq
import json
from collections import OrderedDict
from random import Random
from statistics import median
from typing import Any

import numpy as np
import pytest

from tests.builders import a_plan
from tests.router.chats import a_chat_pipeline, a_writer
from tests.router.test_generation import OUTPUTS, Writers
from tests.router.test_queue import Caller
from trimtab_protocol.chat.internal_wire import Chunk, LastChunk, Usage
from trimtab_router.scheduling.policies import POLICIES
from trimtab_router.scheduling.replica_slots import Completed
from trimtab_router.scheduling.roles import GenerationScheduler
from trimtab_router.scheduling.stage_request import StageRequest

PLACES = 8
CACHE_TOKENS = 100_000
BLOCK_TOKENS = 16
BYTES_PER_TOKEN = 4
PREFILL_TOKENS_PER_SECOND = 4_000.0
TOKEN_SECONDS = 0.02


class LeastLoaded(GenerationScheduler):
    def set_up_role(self) -> None:
        super().set_up_role()
        self.choose_replica = self.replica_selection.free_replica


class Engine:
    """An engine that prefills one prompt after the other, and keeps the blocks of recent ones."""

    def __init__(self) -> None:
        self.cache: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self.free_at = 0.0
        self.tokens = self.cached = self.chats = 0

    def prefill(self, now: float, tenant: str, prompt: bytes) -> tuple[float, int]:
        """When the first token is there, and the cached tokens of the prompt."""
        step = BLOCK_TOKENS * BYTES_PER_TOKEN
        blocks = [(tenant, prompt[:end]) for end in range(step, len(prompt) + 1, step)]
        held = next((number for number, block in enumerate(blocks) if block not in self.cache), len(blocks))
        for block in blocks:
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) * BLOCK_TOKENS > CACHE_TOKENS:
            self.cache.popitem(last=False)
        tokens = len(prompt) // BYTES_PER_TOKEN
        self.tokens, self.cached, self.chats = self.tokens + tokens, self.cached + held * BLOCK_TOKENS, self.chats + 1
        self.free_at = max(self.free_at, now) + (tokens - held * BLOCK_TOKENS) / PREFILL_TOKENS_PER_SECOND
        return self.free_at, held * BLOCK_TOKENS


class Conversations(Writers):
    """A scheduler whose replicas are simulated engines, and conversations of several turns with it."""

    def __init__(self, role: type[GenerationScheduler], engines: int) -> None:
        self.engines = {f"slot-{number}": Engine() for number in range(engines)}
        self.first_tokens: list[float] = []
        pipeline = a_chat_pipeline([a_writer()])
        stage, plan = pipeline.spec.stages[-1], a_plan(pipeline, batchSize=PLACES).spec.stages[-1]
        self.begin(role, stage, plan, POLICIES["EarliestDeadlineFirst"], "Never", engines)

    def say(self, tenant: str, messages: list[dict[str, Any]]) -> None:
        array = np.array([json.dumps(messages, separators=(",", ":")).encode()], object)
        work = StageRequest(Caller(), "text", 1, {"messages": array}, deadline=1e9, now=self.clock.now)
        work.tenant = tenant
        self.scheduler.estimate_prompts(work, 0)
        self.scheduler.enqueue(work)

    def stream(self, batch: Any, wrote: Any, ended: Any) -> None:
        work = batch.row_slices[0].request
        prompt = bytes(work.inputs["messages"][0])
        first, cached = self.engines[batch.replica.name].prefill(self.clock.now, work.tenant, prompt)
        usage = Usage(len(prompt) // BYTES_PER_TOKEN, 50, 0, cached, 0)
        self.clock.call_at(first, lambda: self._first_token(work, batch, wrote))
        self.clock.call_at(first + 50 * TOKEN_SECONDS, lambda: self._last_token(batch, wrote, ended, usage))

    def _first_token(self, work: StageRequest, batch: Any, wrote: Any) -> None:
        self.first_tokens.append(self.clock.now - work.enqueued_at)
        wrote(batch, Chunk("a"))

    def _last_token(self, batch: Any, wrote: Any, ended: Any, usage: Usage) -> None:
        wrote(batch, LastChunk("", "stop", usage))
        ended(batch, Completed((OUTPUTS,), batch.point.name))

    def hold(
        self, conversations: int, turns: int, seed: int = 1, system: str = "", every: float = 1.0, own_bytes: int = 0
    ) -> "Conversations":
        """Begin a conversation every so many seconds; its next turn follows the answer after a pause.

        All begin with the same `system` prompt, or each with one of its own of `own_bytes`.
        """
        random, due, order = Random(seed), list[tuple[float, int, int]](), 0
        chats: dict[int, list[dict[str, Any]]] = {}
        for number in range(conversations):
            content = system or (random.randbytes(own_bytes // 2).hex() if own_bytes else "")
            chats[number] = [{"role": "system", "content": content}] if content else []
            heapq.heappush(due, (number * every, number, 0))
        while due:
            at, number, turn = heapq.heappop(due)
            self.clock.run(max(at, self.clock.now))
            chats[number].append({"role": "user", "content": random.randbytes(400).hex()})
            self.say("all" if system else f"tenant-{number % 5}", chats[number])
            chats[number].append({"role": "assistant", "content": random.randbytes(100).hex()})
            if turn + 1 < turns:
                order += 1
                heapq.heappush(due, (at + 3.0 + random.expovariate(0.5), number, turn + 1))
        self.clock.run(self.clock.now + 60.0)
        assert len(self.first_tokens) == conversations * turns
        return self

    @property
    def hits(self) -> float:
        return sum(engine.cached for engine in self.engines.values()) / sum(e.tokens for e in self.engines.values())

    @property
    def share(self) -> float:
        """Chats of the busiest engine, in means of all."""
        chats = [engine.chats for engine in self.engines.values()]
        return max(chats) * len(chats) / sum(chats)


@pytest.mark.parametrize("seed", range(5))
def test_conversations_return_to_the_replica_of_their_prefix(seed: int):
    single, blind, aware = (
        Conversations(role, engines).hold(60, 8, seed=seed)
        for role, engines in ((GenerationScheduler, 1), (LeastLoaded, 2), (GenerationScheduler, 2))
    )

    assert aware.hits >= 0.9 * single.hits
    assert median(aware.first_tokens) <= 0.75 * median(blind.first_tokens)
    assert aware.share <= 1.3


def test_common_system_prompt_is_held_by_all_replicas():
    aware = Conversations(GenerationScheduler, 3).hold(60, 8, system="be kind " * 400)

    assert aware.share <= 1.3
    assert aware.hits >= 0.7


@pytest.mark.parametrize("seed", range(5))
def test_replica_with_new_conversations_is_no_outlier(seed: int):
    """Its first tokens take ten times as long as those of conversations that return to another replica."""
    top = Conversations(GenerationScheduler, 2).hold(60, 4, seed=seed, every=2.0, own_bytes=8_000)

    assert max(top.first_tokens) > 10 * min(top.first_tokens)
    assert not [call for call in top.stats_calls if "ejected" in str(call) or "ejection" in str(call)]
