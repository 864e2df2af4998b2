"""gRPC health service, and a limit on long-lived streams, so that watches do not block health checks.

grpcio's asyncio servicer deletes the event that all watchers of a service wait for as soon as one of them ends.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

MAX_STREAMS = 64
"""Concurrent long-lived streams of each kind."""
Context = grpc.aio.ServicerContext[Any, Any]


class StreamLimit:
    """Limit on the concurrent streams of one kind.

    Args:
        kind: activity of the clients, for the error message.
        limit: maximum number of streams.
    """

    def __init__(self, kind: str, limit: int = MAX_STREAMS) -> None:
        self._kind = kind
        self._limit = limit
        self._count = 0

    @asynccontextmanager
    async def slot(self, context: Context) -> AsyncIterator[None]:
        """Hold one slot while the context lasts. Aborts the call (RESOURCE_EXHAUSTED) if none is free."""
        if self._count >= self._limit:
            message = f"{self._count} clients {self._kind} already; try again when one has ended"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


class Health:
    """Serves `grpc.health.v1.Health`, with the same status for each service.

    Args:
        services: known service names.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(services)
        self._status = HealthCheckResponse.NOT_SERVING
        self._changed = asyncio.Event()
        self._watches = StreamLimit("watch health")

    def set_status(self, *, serving: bool) -> None:
        """Set the status, and notify watchers if it changed."""
        status = HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
        if status != self._status:
            self._status = status
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:  # noqa: N802 - gRPC's
        """Current status. NOT_FOUND for an unknown service."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service[:200]!r}")
        return HealthCheckResponse(status=self._status)

    async def Watch(self, request: HealthCheckRequest, context: Context) -> None:  # noqa: N802 - gRPC's
        """Current status and each change. SERVICE_UNKNOWN for an unknown service."""
        is_known, sent = request.service in self._services, None
        async with self._watches.slot(context):
            while True:
                changed = self._changed  # read before the status, so that a slow write misses no change
                status = self._status if is_known else HealthCheckResponse.SERVICE_UNKNOWN
                if status != sent:
                    await context.write(HealthCheckResponse(status=status))
                    sent = status
                await changed.wait()
