"""uvloop event loop with a fix for uvloop issue 738, tasks that run as long as it, and its lag.

If a connection over an existing socket (as in aiohttp's client) is cancelled or fails, uvloop closes the descriptor but
not the socket object. When that is collected, it closes the descriptor again, which may belong to another connection by
then. The issue is fixed after 0.22.1, which MLServer 1.7.1 does not support. Here the socket is detached.
"""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

log = logging.getLogger(__name__)

Result = TypeVar("Result")
RESTART_SECONDS = 1.0
LAG_INTERVAL_SECONDS = 0.1
LAG_WINDOW_SECONDS = 60.0
READINESS_WINDOW_SECONDS = 5.0
MIN_LAG_SECONDS, READY_LAG_SECONDS, UNREADY_LAG_SECONDS = 0.05, 0.25, 1.0
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


class LagReadiness:
    """Whether an event loop keeps up: not once it lagged for a second of the last five, until it hardly lags."""

    def __init__(self) -> None:
        self.reason = ""
        """Why it does not keep up; empty if it does."""
        self._lags: deque[tuple[float, float]] = deque()

    def observe(self, lag_seconds: float, now: float) -> None:
        if lag_seconds >= MIN_LAG_SECONDS:
            self._lags.append((now, lag_seconds))
        while self._lags and self._lags[0][0] <= now - READINESS_WINDOW_SECONDS:
            self._lags.popleft()
        lagged_seconds = sum(lag for _, lag in self._lags)
        if lagged_seconds >= UNREADY_LAG_SECONDS:
            self.reason = f"its event loop lagged for {lagged_seconds:.1f} s of {READINESS_WINDOW_SECONDS:g} s"
        elif lagged_seconds <= READY_LAG_SECONDS:
            self.reason = ""


class LagMonitor:
    """Longest lag of an event loop, in seconds, within one to two windows: how late a timer ran."""

    def __init__(self) -> None:
        self.readiness = LagReadiness()
        self._maxima = [0.0, 0.0]
        """Of the previous window and of this one."""

    @property
    def seconds(self) -> float:
        return max(self._maxima)

    async def watch(self) -> None:
        """Measure for ever."""
        loop = asyncio.get_running_loop()
        window_ends_at = loop.time() + LAG_WINDOW_SECONDS
        while True:
            due_at = loop.time() + LAG_INTERVAL_SECONDS
            await asyncio.sleep(LAG_INTERVAL_SECONDS)
            now = loop.time()
            if now >= window_ends_at:
                self._maxima = [self._maxima[1], 0.0]
                window_ends_at = now + LAG_WINDOW_SECONDS
            self._maxima[1] = max(self._maxima[1], now - due_at)
            self.readiness.observe(now - due_at, now)
