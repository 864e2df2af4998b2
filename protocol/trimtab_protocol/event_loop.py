"""The event loop of our processes: uvloop's, but for one of its faults.

Where a connection over a socket that is given (as aiohttp's client does it) is cancelled or fails, uvloop closes the
descriptor and lets the socket believe that it still owns it. Once that is collected, it closes the descriptor again:
by then somebody else's connection, whose bytes may then go to a third (uvloop issue 738; mended above version 0.22.1,
which MLServer 1.7.1 does not run on). Here the socket is told.
"""

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

Result = TypeVar("Result")


class Loop(uvloop.Loop):
    """A loop whose failed connections close their descriptors once."""

    async def create_connection(self, *args: Any, sock: socket.socket | None = None, **options: Any) -> Any:
        """Connect as asyncio does; a socket that was given belongs to the loop from now on, whatever happens."""
        try:
            return await super().create_connection(*args, sock=sock, **options)
        except BaseException:
            if sock is not None:
                sock.detach()
            raise


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Make one."""
    return Loop()


def run(doing: Coroutine[Any, Any, Result]) -> Result:
    """Run something to its end in a loop of its own."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(doing)
