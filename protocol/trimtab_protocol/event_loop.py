"""uvloop event loop with a fix for uvloop issue 738, and tasks that run as long as it.

If a connection over an existing socket (as in aiohttp's client) is cancelled or fails, uvloop closes the descriptor but
not the socket object. When that is collected, it closes the descriptor again, which may belong to another connection by
then. The issue is fixed after 0.22.1, which MLServer 1.7.1 does not support. Here the socket is detached.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

log = logging.getLogger(__name__)

Result = TypeVar("Result")
RESTART_SECONDS = 1.0
Service = Callable[[], Coroutine[Any, Any, None]]


class Loop(uvloop.Loop):
    """Event loop whose failed connections close their descriptors once."""

    async def create_connection(self, *args: Any, sock: socket.socket | None = None, **options: Any) -> Any:
        """Connect as asyncio does; the loop takes ownership of a given socket, even on failure."""
        try:
            return await super().create_connection(*args, sock=sock, **options)
        except BaseException:
            if sock is not None:
                sock.detach()
            raise


def new_event_loop() -> asyncio.AbstractEventLoop:
    return Loop()


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(coroutine)


def start_service(name: str, service: Service) -> asyncio.Task[None]:
    """Start a coroutine that must not end: if it raises, the error is logged and it is started again."""

    async def supervise() -> None:
        while True:
            try:
                await service()
            except Exception:
                log.exception("%s failed; it is started again in %.0f s", name, RESTART_SECONDS)
            await asyncio.sleep(RESTART_SECONDS)

    return asyncio.get_running_loop().create_task(supervise(), name=name)
