"""A replica whose engine failed is not ready, and ends."""

import asyncio
from multiprocessing.connection import Connection
from typing import Any, cast

import aiohttp
import pytest

from tests.model_servers.chat.chat_client import ChatClient, a_chat, a_chat_spec
from tests.model_servers.conftest import Replica, serve
from trimtab_model_servers.chat.chat_model import ChatModel
from trimtab_model_servers.engine.core import EngineCore
from trimtab_model_servers.server.hosted_model import load
from trimtab_model_servers.server.model_registry import ModelRegistry
from trimtab_model_servers.server.settings import write_models
from trimtab_protocol import InferRequest

SMALL = {"slots": 4, "slot_tokens": 400, "step_tokens": 40}
FATAL_TOKENS = 13


class FailingCore(EngineCore):
    """An engine that fails on a request for ``FATAL_TOKENS`` tokens."""

    def submit(self, request: Any, *arguments: Any) -> None:
        super().submit(request, *arguments)
        self.failing = request.max_new_tokens == FATAL_TOKENS

    def step(self) -> bool:
        if self.failing:
            raise ZeroDivisionError("an engine failure")
        return super().step()

    failing = False


def serve_mortal(folder: str, connection: Connection) -> None:
    """Run a replica whose engine may fail."""
    from trimtab_model_servers.chat import chat_model  # noqa: PLC0415  (only in the forked child)

    vars(chat_model)["EngineCore"] = FailingCore
    serve(folder, connection)


@pytest.fixture
def fatal() -> InferRequest:
    return a_chat("colocated", "What is 3+4?", max_tokens=FATAL_TOKENS)


async def test_replica_with_failed_engine_is_not_ready(monkeypatch, fatal):
    monkeypatch.setattr("trimtab_model_servers.chat.chat_model.EngineCore", FailingCore)
    registry = ModelRegistry(expected={"colocated"})
    model = await registry.worker.run(lambda: load(a_chat_spec("colocated", parameters=SMALL), registry.worker))
    registry.add_model("colocated", model)
    assert (registry.ready, registry.serving) == (True, True)
    try:
        with pytest.raises(Exception, match="the engine failed: ZeroDivisionError"):
            await model.infer(fatal, registry.worker)
        await registry.model_failed.wait()
        assert (registry.ready, registry.serving) == (False, False)
        assert "ZeroDivisionError" in registry.failed_models["colocated"]
    finally:
        await cast("ChatModel", model).close()
        registry.worker.close()


async def test_replica_with_failed_engine_ends(start, tmp_path, fatal):
    write_models([a_chat_spec("colocated", parameters=SMALL)], tmp_path)
    running = start(tmp_path, serve_mortal)
    assert isinstance(running, Replica), running
    async with aiohttp.ClientSession() as session:
        status, why = await ChatClient(session, running.ports).refused(fatal)
    await asyncio.to_thread(running.process.join, 30)

    assert (status, "the engine failed" in why) == (500, True)
    assert running.process.exitcode is not None
