"""Data port: disconnects, failed upstream connections, and cached metrics."""

import asyncio
import logging
import time
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from trimtab_model_servers.server import chat_routes
from trimtab_model_servers.server.chat_metrics import CachedExposition
from trimtab_model_servers.server.data_port import DataPort
from trimtab_protocol.event_loop import LAG_INTERVAL_SECONDS, UNREADY_LAG_SECONDS


@pytest.fixture
async def address():
    host: Any = SimpleNamespace(model=lambda name: name, serving=True)
    port = DataPort(host)
    yield f"http://127.0.0.1:{await port.start('127.0.0.1', 0)}/v2/models/m/embeddings/e"
    await port.stop()


def faults(caplog):
    return [record.message for record in caplog.records if record.levelno >= logging.ERROR]


async def test_loopback_port_refuses_other_hosts(address):
    async with aiohttp.ClientSession() as session:
        for headers in ({"Host": "rebound.example"}, {"Origin": "https://rebound.example"}):
            async with session.get(address.replace("embeddings/e", "ready"), headers=headers) as response:
                assert response.status == 403


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


async def test_blocked_loop_is_not_ready_for_its_reason(address):
    ready = address.replace("embeddings/e", "ready")
    async with aiohttp.ClientSession() as session:
        async with session.get(ready) as response:
            assert (response.status, await response.json()) == (200, {"name": "m", "ready": True})
        time.sleep(UNREADY_LAG_SECONDS + LAG_INTERVAL_SECONDS)  # noqa: ASYNC251  (the pause)
        await asyncio.sleep(LAG_INTERVAL_SECONDS)
        async with session.get(ready) as response:
            answer = await response.json()

    assert response.status == 503
    assert answer["reason"].startswith("its event loop lagged")


def test_metrics_are_rendered_at_most_once_a_second():
    texts = iter((b"first", b"second", b"third"))
    metrics = CachedExposition(lambda: next(texts))

    assert [metrics.at(now) for now in (10.0, 10.0, 10.999, 11.0, 11.5, 60.0)] == [
        *(b"first", b"first", b"first"),
        *(b"second", b"second", b"third"),
    ]
