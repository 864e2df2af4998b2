"""Clients beside the load: one that connects anew for each request, those that retry, and replaced credentials."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from tests.e2e.conftest import NAMESPACE
from tests.e2e.observed import ObservedPipeline, until
from trimtab_pipelines.kubernetes_names import COMPONENT, PIPELINE_LABEL
from trimtab_router.envoy.api_keys import new_key

VISIT_SECONDS, RETRY_SECONDS = 0.2, 0.2
RETRIED_PER_SECOND = 1
PATIENCE_SECONDS = 60.0
TIMEOUT_SECONDS = 30.0
RETRYABLE = frozenset({429, 503, 504})
ROUNDS = 5
CERTIFICATE_SECONDS = 120.0
"""The kubelet looks for new Secrets about once a minute, sooner if the pod itself changes."""
KEY_SECONDS = 30.0
LOOK_SECONDS = 0.02
CONSECUTIVE_RESPONSES = 25
"""After this many equal ones in a row every router, of which a plan may have several, has read a change of keys."""
MARK = "trimtab.dev/certificate-serial"


def metadata_url(pipeline: ObservedPipeline) -> str:
    return f"https://{pipeline.address}/v2/models/{pipeline.name}"


def connection(pipeline: ObservedPipeline, timeout_seconds: float = TIMEOUT_SECONDS) -> aiohttp.ClientSession:
    """A session of its own, which trusts the run's authority only."""
    connector = aiohttp.TCPConnector(ssl=pipeline.installation.credentials.tls)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(timeout_seconds))


@dataclass(slots=True)
class Visitor:
    """A client with a key of its own that connects anew for each request, and notes the certificate."""

    pipeline: ObservedPipeline
    client: str
    """Name of its key."""
    answered: int = 0
    asked_to_retry: int = 0
    failed: list[str] = field(default_factory=list)
    serial: str = ""
    """Serial number of the certificate of its last connection."""
    last_client: str = ""
    """Name of the key of its last request."""

    async def visit(self) -> None:
        client, (host, port) = self.client, self.pipeline.address.rsplit(":", 1)
        credentials = self.pipeline.installation.credentials
        lines = [f"GET /v2/models/{self.pipeline.name} HTTP/1.1", f"Host: {host}", "Connection: close"]
        request = "\r\n".join([*lines, f"x-api-key: {credentials.keys[client]}", "", ""])
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                reader, writer = await asyncio.open_connection(host, int(port), ssl=credentials.tls)
                writer.write(request.encode())
                response = await reader.read(-1)
                self.serial = str(writer.get_extra_info("peercert")["serialNumber"])
                writer.close()
            status = int(response.split(None, 2)[1])
        except (OSError, TimeoutError, LookupError) as error:
            self.failed.append(f"{type(error).__name__} {error}")
            return
        self.last_client = client
        self.answered += status == 200
        self.asked_to_retry += status in RETRYABLE
        if status != 200 and status not in RETRYABLE:
            self.failed.append(response.decode())


@asynccontextmanager
async def visiting(pipeline: ObservedPipeline, client: str) -> AsyncIterator[Visitor]:
    """Visit the pipeline while the block runs."""
    visitor, stop = Visitor(pipeline, client), asyncio.Event()

    async def visit() -> None:
        while not stop.is_set():
            await visitor.visit()
            await asyncio.sleep(VISIT_SECONDS)

    async with asyncio.TaskGroup() as group:
        group.create_task(visit())
        try:
            yield visitor
        finally:
            stop.set()


@dataclass(slots=True)
class Replacements:
    """Seconds of each replacement of credentials, and the visitor beside; infinite if it did not take effect."""

    visitor: Visitor
    certificate_seconds: list[float] = field(default_factory=list)
    accepted_seconds: list[float] = field(default_factory=list)
    rejected_seconds: list[float] = field(default_factory=list)


async def replace_credentials(pipeline: ObservedPipeline, calm_seconds: float) -> Replacements:
    """Replace the certificate, then the visitor's key, again and again, with some calm before each time."""
    keys = pipeline.installation.credentials.keys
    keys["visitor-0"] = new_key()
    await _accepted(pipeline, "visitor-0")
    async with visiting(pipeline, "visitor-0") as visitor:
        replacements = Replacements(visitor)
        for number in range(ROUNDS):
            await asyncio.sleep(calm_seconds)
            replacements.certificate_seconds.append(await _seconds(lambda: _certificate_served(pipeline, visitor)))
            old, new = visitor.client, f"visitor-{number + 1}"
            keys[new] = new_key()
            replacements.accepted_seconds.append(await _seconds(lambda new=new: _accepted(pipeline, new)))  # type: ignore[misc]
            visitor.client = new

            async def uses(client: str = new) -> bool:
                return visitor.last_client == client

            await until(uses, "the visitor's request with its new key", KEY_SECONDS, LOOK_SECONDS)
            replacements.rejected_seconds.append(await _rejected(pipeline, old))
    return replacements


async def _seconds(act: Callable[[], Awaitable[object]]) -> float:
    began = time.monotonic()
    try:
        await act()
    except AssertionError:
        return math.inf
    return time.monotonic() - began


async def _certificate_served(pipeline: ObservedPipeline, visitor: Visitor) -> None:
    """Write another certificate and wait until the visitor gets it."""
    serial = await pipeline.renew_certificate()
    routers = f"{PIPELINE_LABEL}={pipeline.name},{COMPONENT}=router"
    annotate = ("annotate", "pods", "-n", NAMESPACE, "-l", routers, "--overwrite")
    await pipeline.installation.kubectl(*annotate, f"{MARK}={serial}")

    async def is_served() -> bool:
        return visitor.serial == serial

    await until(is_served, "the new certificate", CERTIFICATE_SECONDS, LOOK_SECONDS)


async def _accepted(pipeline: ObservedPipeline, client: str) -> None:
    await _write_keys(pipeline)
    headers = {"x-api-key": pipeline.installation.credentials.keys[client]}
    consecutive = 0

    async def is_accepted() -> bool:
        nonlocal consecutive
        async with connection(pipeline) as session, session.get(metadata_url(pipeline), headers=headers) as response:
            match response.status:
                case 200:
                    consecutive += 1
                case 401:
                    consecutive = 0
        return consecutive == CONSECUTIVE_RESPONSES

    await until(is_accepted, f"the key of {client} at every router", KEY_SECONDS, LOOK_SECONDS)


async def _rejected(pipeline: ObservedPipeline, client: str) -> float:
    """Revoke a key; returns the seconds until its first rejection on a connection that stays open."""
    headers = {"x-api-key": pipeline.installation.credentials.keys.pop(client)}
    consecutive, first = 0, math.inf
    async with connection(pipeline) as session:

        async def status() -> int:
            async with session.get(metadata_url(pipeline), headers=headers) as response:
                await response.read()  # else the connection is closed
                return response.status

        await status()
        began = time.monotonic()
        await _write_keys(pipeline)
        while consecutive < CONSECUTIVE_RESPONSES and time.monotonic() - began < KEY_SECONDS:
            match await status():
                case 200:
                    consecutive, first = 0, math.inf
                case 401:
                    consecutive, first = consecutive + 1, min(first, time.monotonic() - began)
    return first


async def _write_keys(pipeline: ObservedPipeline) -> None:
    await pipeline.installation.apply(pipeline.installation.credentials.hashed(NAMESPACE))


@dataclass(slots=True)
class Retried:
    """Requests of clients that retry."""

    answered: int = 0
    lost: int = 0


@asynccontextmanager
async def retrying(pipeline: ObservedPipeline) -> AsyncIterator[Retried]:
    """Send a request a second while the block runs, and retry each until it is answered."""
    inputs = (await pipeline.document())["spec"]["inputs"]
    body = {"inputs": [_zeros(tensor) for tensor in inputs]}
    retried, stop = Retried(), asyncio.Event()

    async def send() -> None:
        async with asyncio.TaskGroup() as requests:
            while not stop.is_set():
                requests.create_task(_persist(pipeline, body, retried))
                await asyncio.sleep(1 / RETRIED_PER_SECOND)

    async with asyncio.TaskGroup() as group:
        group.create_task(send())
        try:
            yield retried
        finally:
            stop.set()


def _zeros(tensor: dict[str, Any]) -> dict[str, Any]:
    size = int(np.prod(tensor["shape"]))
    shape = {"shape": [1, *tensor["shape"]], "data": [0] * size}
    return {"name": tensor["name"], "datatype": tensor["datatype"], **shape}


async def _persist(pipeline: ObservedPipeline, body: dict[str, Any], retried: Retried) -> None:
    """Send one request, each time on a connection of its own, until it is answered."""
    url, headers = f"{metadata_url(pipeline)}/infer", pipeline.installation.credentials.access().headers
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        try:
            async with (
                connection(pipeline, timeout_seconds=5.0) as session,
                session.post(url, json=body, headers=headers) as response,
            ):
                if response.status == 200:
                    retried.answered += 1
                    return
                if response.status not in RETRYABLE:
                    break
        except (aiohttp.ClientError, TimeoutError):
            pass
        await asyncio.sleep(RETRY_SECONDS)
    retried.lost += 1
