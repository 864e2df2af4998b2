"""Chat sessions: the earliest deadline is scheduled first."""

import contextlib
import json
from typing import Any, cast

from trimtab_model_servers.chat.interfaces import ChatParameters, Prompt
from trimtab_model_servers.chat.messages import read_messages, read_options
from trimtab_model_servers.chat.request_parser import ChatRow
from trimtab_model_servers.chat.sessions import ChatSessions
from trimtab_model_servers.engine.scheduler import EngineLimits, Scheduler

PROMPT_TOKENS = 6


class FakeTokenizer:
    """Builds prompts of a fixed length; every token is the number in the chat's text."""

    end_ids: frozenset[int] = frozenset()

    def build_prompt(self, messages, rows):  # noqa: ARG002  (interface)
        return Prompt((int(messages[0].text),) * PROMPT_TOKENS, ())


class FakeEngine:
    """An engine with one slot and a real scheduler, without a model."""

    def __init__(self):
        self.scheduler = Scheduler(EngineLimits(slots=1, slot_tokens=20, step_tokens=PROMPT_TOKENS))

    async def stream(self, request, embeddings):  # noqa: ARG002  (interface)
        self.scheduler.submit(request)
        return
        yield

    def finish_next(self) -> int:
        """Compute the next prompt and finish its chat; return the chat's number."""
        step = self.scheduler.next_step()
        assert step is not None
        (chunk,) = step.prefills
        self.scheduler.record_computed(chunk)
        self.scheduler.finish(chunk.request_id)
        return chunk.tokens[0]


class Replica:
    """Chat sessions in such an engine, with a fake clock."""

    def __init__(self):
        self.engine, self.now = FakeEngine(), 1000.0
        self._sessions = ChatSessions(
            cast("Any", self.engine),
            cast("Any", FakeTokenizer()),
            ChatParameters(slot_tokens=20, max_new_tokens=5),
            lambda: self.now,
        )

    async def send(self, number: int, deadline_seconds: float) -> None:
        messages = read_messages(json.dumps([{"role": "user", "content": str(number)}]).encode())
        options = read_options(json.dumps({"deadline_seconds": deadline_seconds}).encode())
        async with contextlib.aclosing(self._sessions.stream(ChatRow(messages, options, ()))) as events:
            assert [event async for event in events] == []


async def test_earliest_deadline_is_prefilled_first():
    replica = Replica()
    await replica.send(1, deadline_seconds=10.0)
    await replica.send(2, deadline_seconds=0.2)

    assert [replica.engine.finish_next() for _ in range(2)] == [2, 1]


async def test_urgent_chats_do_not_starve_others():
    replica = Replica()
    await replica.send(0, deadline_seconds=10.0)
    order = []
    for number in range(1, 100):
        replica.now += 0.5
        await replica.send(number, deadline_seconds=2.0)
        order.append(replica.engine.finish_next())

    assert order[:15] == list(range(1, 16))
    assert order[15] == 0  # after 8 s every new chat has a later deadline
