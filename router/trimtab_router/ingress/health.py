"""gRPC's health service, and a bound on calls that last: however many watch, who asks once is told at once.

grpcio's own servicer for asyncio deletes what all watchers of a service wait for as soon as one of them ends.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

MOST_STREAMS = 64
"""Calls at once that last as long as their callers like, of each kind."""
Context = grpc.aio.ServicerContext[Any, Any]


class Streams:
    """Bounds the calls of one kind that last.

    Args:
        kind: what callers do in them, for those who are refused.
        most: how many there may be at once.
    """

    def __init__(self, kind: str, most: int = MOST_STREAMS) -> None:
        self._kind = kind
        self._most = most
        self._under_way = 0

    @asynccontextmanager
    async def place(self, context: Context) -> AsyncIterator[None]:
        """A place as long as the context lasts; the call is refused (RESOURCE_EXHAUSTED) where there is none."""
        if self._under_way >= self._most:
            words = f"{self._under_way} callers {self._kind} already; try again when one has ended"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, words)
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1


class Health:
    """Answers `grpc.health.v1.Health`: the same of each service.

    Args:
        services: the names that may be asked for.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(services)
        self._status = HealthCheckResponse.NOT_SERVING
        self._changed = asyncio.Event()
        self._watches = Streams("watch health")

    def tell(self, *, serving: bool) -> None:
        """Answer so from now on, and tell all who watch where it is news."""
        status = HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
        if status != self._status:
            self._status = status
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:  # noqa: N802 - gRPC's
        """The status now; NOT_FOUND for a service that nobody knows."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service[:200]!r}")
        return HealthCheckResponse(status=self._status)

    async def Watch(self, request: HealthCheckRequest, context: Context) -> None:  # noqa: N802 - gRPC's
        """The status now and after each change; SERVICE_UNKNOWN for a service that nobody knows."""
        known, told = request.service in self._services, None
        async with self._watches.place(context):
            while True:
                changed = self._changed  # before the status is read: who writes slowly misses no change
                status = self._status if known else HealthCheckResponse.SERVICE_UNKNOWN
                if status != told:
                    await context.write(HealthCheckResponse(status=status))
                    told = status
                await changed.wait()
