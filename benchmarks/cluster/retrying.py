"""Clients that try again where there was no connection or no room, as clients of a service with replicas do."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.cluster.observing import Watched

EVERY_SECONDS = 1.0
PATIENCE_SECONDS = 60.0
PAUSE_SECONDS = 0.2
TRY_AGAIN = frozenset({429, 503, 504})


@dataclass(slots=True)
class Retried:
    """How it went for them."""

    answered: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Door:
    """Where they call, and what they show."""

    url: str
    headers: dict[str, str]
    tls: ssl.SSLContext


@asynccontextmanager
async def retrying(watched: Watched) -> AsyncIterator[Retried]:
    """Send a request a second while the block runs, each until it has its answer, and wait for the last."""
    found = (await watched.object()) or {}
    tensors = [
        {
            "name": tensor["name"],
            "datatype": tensor["datatype"],
            "shape": [1, *tensor["shape"]],
            "data": [0] * _size(tensor["shape"]),
        }
        for tensor in found["spec"]["inputs"]
    ]
    retried, stop = Retried(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(_send(watched, {"inputs": tensors}, retried, stop))
        yield retried
        stop.set()
        await sending


def _size(shape: list[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


async def _send(watched: Watched, body: dict[str, Any], retried: Retried, stop: asyncio.Event) -> None:
    known = watched.setting.credentials
    door = Door(f"https://{watched.address}/v2/models/{watched.name}/infer", known.access().headers, known.tls)
    async with asyncio.TaskGroup() as group:
        while not stop.is_set():
            group.create_task(_persist(door, body, retried))
            await asyncio.sleep(EVERY_SECONDS)


async def _persist(door: Door, body: dict[str, Any], retried: Retried) -> None:
    """Send one request, over a connection of its own, until it is answered."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        try:
            async with httpx.AsyncClient(timeout=5.0, verify=door.tls, headers=door.headers) as client:
                answer = await client.post(door.url, json=body)
            if answer.status_code == 200:
                retried.answered += 1
                return
            if answer.status_code not in TRY_AGAIN:
                break
        except httpx.TransportError:
            pass
        await asyncio.sleep(PAUSE_SECONDS)
    retried.lost += 1
