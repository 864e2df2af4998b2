"""Whose chat is read next in one engine: whose answer is due first, by the replica's clock from when each chat came."""

import contextlib
import json
from typing import Any, cast

from trimtab_model_servers.chat.interfaces import Prompt
from trimtab_model_servers.chat.messages import read_messages, read_options
from trimtab_model_servers.chat.request_parser import ChatRow
from trimtab_model_servers.chat.sessions import ChatSessions, TokenLimits
from trimtab_model_servers.engine.scheduler import EngineLimits, Scheduler

PROMPT_TOKENS = 6


class Spelling:
    """Spells every chat with as many tokens, the first of which is the number that is its text."""

    end_ids: frozenset[int] = frozenset()

    def build_prompt(self, messages, rows):  # noqa: ARG002 - of a model's writing
        return Prompt((int(messages[0].text),) * PROMPT_TOKENS, ())


class Reading:
    """An engine of one slot that computes nothing, but keeps a scheduler as the real one does."""

    def __init__(self):
        self.scheduler = Scheduler(EngineLimits(slots=1, slot_tokens=20, step_tokens=PROMPT_TOKENS))

    async def stream(self, request, there):  # noqa: ARG002 - of an engine
        self.scheduler.submit(request)
        return
        yield

    def read_next(self) -> int:
        """The number of the chat whose prompt is read next; its answer ends at once."""
        step = self.scheduler.next_step()
        assert step is not None
        (part,) = step.prefills
        self.scheduler.record_computed(part)
        self.scheduler.finish(part.request_id)
        return part.tokens[0]


class Replica:
    """Talks in such an engine, with a clock that tests move."""

    def __init__(self):
        self.engine, self.now = Reading(), 1000.0
        self._sessions = ChatSessions(
            cast("Any", self.engine), cast("Any", Spelling()), TokenLimits(5, 20), lambda: self.now
        )

    async def take(self, number: int, deadline_seconds: float) -> None:
        messages = read_messages(json.dumps([{"role": "user", "content": str(number)}]).encode())
        options = read_options(json.dumps({"deadline_seconds": deadline_seconds}).encode())
        async with contextlib.aclosing(self._sessions.stream(ChatRow(messages, options, ()))) as words:
            assert [word async for word in words] == []


async def test_earliest_deadline_is_prefilled_first():
    replica = Replica()
    await replica.take(1, deadline_seconds=10.0)
    await replica.take(2, deadline_seconds=0.2)

    assert [replica.engine.read_next() for _ in range(2)] == [2, 1]


async def test_urgent_chats_do_not_starve_others():
    replica = Replica()
    await replica.take(0, deadline_seconds=10.0)
    read = []
    for number in range(1, 100):
        replica.now += 0.5
        await replica.take(number, deadline_seconds=2.0)
        read.append(replica.engine.read_next())

    assert read[:15] == list(range(1, 16))
    assert read[15] == 0  # after 8 s, from when on nobody who comes is due before it
