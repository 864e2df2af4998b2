"""Shell: a caller beside the load, with its own key, who connects anew for each request and reads the certificate."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from benchmarks.cluster.observing import Watched

EVERY_SECONDS = 0.2
TIMEOUT_SECONDS = 5.0
ANSWERED = 200


@dataclass(slots=True)
class Visitor:
    """Asks what the pipeline is, again and again: that needs a key too, and costs the pipeline nothing."""

    watched: Watched
    client: str
    answered: int = 0
    failed: list[str] = field(default_factory=list)
    serial: str = ""
    """Of the certificate that it saw last."""

    async def visit(self) -> None:
        """Connect, ask once, and remember how it went."""
        known = self.watched.setting.credentials
        try:
            async with self.connection() as connection:
                answer = await connection.get(self.url, headers={"x-api-key": known.keys[self.client]})
        except httpx.TransportError as error:
            self.failed.append(f"{type(error).__name__} {error}")
            return
        tls = answer.extensions["network_stream"].get_extra_info("ssl_object")
        self.serial = str((tls.getpeercert() or {}).get("serialNumber", "")) if tls is not None else ""
        if answer.status_code == ANSWERED:
            self.answered += 1
        else:
            self.failed.append(f"{answer.status_code} {answer.text}")

    @property
    def url(self) -> str:
        """What it asks for."""
        return f"https://{self.watched.address}/v2/models/{self.watched.name}"

    def connection(self) -> httpx.AsyncClient:
        """Connections that trust the run's authority alone."""
        return httpx.AsyncClient(verify=self.watched.setting.credentials.tls, timeout=TIMEOUT_SECONDS)


@asynccontextmanager
async def visiting(watched: Watched, client: str) -> AsyncIterator[Visitor]:
    """Visit the pipeline while the block runs, with the key that the client has at the time."""
    visitor = Visitor(watched, client)

    async def always() -> None:
        while not done.is_set():
            await visitor.visit()
            await asyncio.sleep(EVERY_SECONDS)

    done = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(always())
        try:
            yield visitor
        finally:
            done.set()
