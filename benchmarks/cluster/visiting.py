"""A caller beside the load, with its own key, who connects anew for each request and reads the certificate."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from benchmarks.cluster.observing import Watched
from benchmarks.cluster.retrying import TRY_AGAIN

EVERY_SECONDS = 0.2
TIMEOUT_SECONDS = 30.0
ANSWERED = 200


@dataclass(slots=True)
class Visitor:
    """Asks what the pipeline is, again and again: that needs a key too, and costs the pipeline nothing."""

    watched: Watched
    client: str
    answered: int = 0
    turned_away: int = 0
    """Told to try again: there was no room."""
    failed: list[str] = field(default_factory=list)
    serial: str = ""
    """Of the certificate that it saw last."""
    shown: str = ""
    """Whose key it showed last."""

    async def visit(self) -> None:
        """Connect, ask once, and remember how it went."""
        client = self.client
        headers = {"x-api-key": self.watched.setting.credentials.keys[client]}
        try:
            async with connection(self.watched) as anew:
                answer = await anew.get(address(self.watched), headers=headers)
        except httpx.TransportError as error:
            self.failed.append(f"{type(error).__name__} {error}")
            return
        tls = answer.extensions["network_stream"].get_extra_info("ssl_object")
        self.shown, self.serial = client, str(tls.getpeercert()["serialNumber"])
        if answer.status_code == ANSWERED:
            self.answered += 1
        elif answer.status_code in TRY_AGAIN:
            self.turned_away += 1
        else:
            self.failed.append(f"{answer.status_code} {answer.text}")


def address(watched: Watched) -> str:
    """What a visitor asks for."""
    return f"https://{watched.address}/v2/models/{watched.name}"


def connection(watched: Watched) -> httpx.AsyncClient:
    """Connections that trust the run's authority alone."""
    return httpx.AsyncClient(verify=watched.setting.credentials.tls, timeout=TIMEOUT_SECONDS)


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
