"""Data port: disconnects, failed upstream connections, and cached metrics."""

import logging
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from trimtab_model_servers.server import chat_routes
from trimtab_model_servers.server.chat_metrics import CachedExposition
from trimtab_model_servers.server.data_port import DataPort


@pytest.fixture
async def address():
    host: Any = SimpleNamespace(model=lambda name: name)
    port = DataPort(host)
    yield f"http://127.0.0.1:{await port.start('127.0.0.1', 0)}/v2/models/m/embeddings/e"
    await port.stop()


def faults(caplog):
    return [record.message for record in caplog.records if record.levelno >= logging.ERROR]


async def test_client_disconnect_is_not_logged(address, monkeypatch, caplog):
    async def answer(request, *_):
        request.transport.abort()
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(chat_routes, "embeddings", answer)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(address)

    assert faults(caplog) == []


async def test_broken_upstream_connection_is_reported_to_client(address, monkeypatch, caplog):
    async def answer(*_):
        raise ConnectionResetError("the encoder's end")

    monkeypatch.setattr(chat_routes, "embeddings", answer)
    async with aiohttp.ClientSession() as session, session.get(address) as response:
        assert (response.status, "the encoder's end" in await response.text()) == (500, True)

    assert len(faults(caplog)) == 1


def test_metrics_are_rendered_at_most_once_a_second():
    texts = iter((b"first", b"second", b"third"))
    metrics = CachedExposition(lambda: next(texts))

    assert [metrics.at(now) for now in (10.0, 10.0, 10.999, 11.0, 11.5, 60.0)] == [
        *(b"first", b"first", b"first"),
        *(b"second", b"second", b"third"),
    ]
