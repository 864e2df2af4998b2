"""Chat sessions: options of a chat become those of the engine's request."""

import contextlib
from typing import Any, cast

from trimtab_model_servers.chat.interfaces import ChatParameters, Prompt
from trimtab_model_servers.chat.messages import read_options
from trimtab_model_servers.chat.request_parser import ChatRow
from trimtab_model_servers.chat.sessions import ChatSessions
from trimtab_model_servers.engine.request import Request


class FakeEngine:
    """Records requests and ends them at once."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    async def stream(self, request, embeddings):  # noqa: ARG002  (interface)
        self.requests.append(request)
        return
        yield


async def request_of(options: bytes) -> Request:
    """The engine's request of a chat that arrives at 1000 s."""
    engine, parameters = FakeEngine(), ChatParameters(slot_tokens=20, max_new_tokens=64)
    sessions = ChatSessions(cast("Any", engine), frozenset({2}), parameters, lambda: 1000.0)
    chat = ChatRow(read_options(options), "", Prompt((7,) * 6, ()))
    async with contextlib.aclosing(sessions.stream(chat)) as events:
        assert [event async for event in events] == []
    return engine.requests[0]


async def test_deadline_counts_from_arrival():
    assert (await request_of(b'{"deadline_seconds": 0.5}')).due_at == 1000.5


async def test_output_fills_the_slot_at_most():
    free, exact = await request_of(b"{}"), await request_of(b'{"max_tokens": 5, "ignore_eos": true}')

    assert (free.max_new_tokens, free.min_new_tokens, free.end_ids) == (14, 0, frozenset({2}))
    assert (exact.max_new_tokens, exact.min_new_tokens, exact.end_ids) == (5, 5, frozenset())
