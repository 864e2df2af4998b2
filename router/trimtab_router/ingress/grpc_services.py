"""`GrpcServices`: gRPC health and reflection services, in a server of their own behind Envoy.

Long-lived streams are limited, so that watches do not block health checks. The health service is our own: grpcio's
asyncio servicer deletes the event that all watchers of a service wait for as soon as one of them ends.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from trimtab_protocol import grpc_messages
from trimtab_protocol.event_loop import start_service
from trimtab_router.router import Router

MAX_STREAMS = 64  # concurrent long-lived streams of each kind
_POLL_SECONDS = 0.5
_MAX_CALLS = 64  # Concurrent unary calls. Health watches and reflection streams have bounds of their own.
Context = grpc.aio.ServicerContext[Any, Any]


class GrpcServices:
    """Serves `grpc.health.v1.Health` and `grpc.reflection.v1alpha.ServerReflection` for a router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._health = Health(("", grpc_messages.SERVICE, router.pipeline.name))
        self._server: grpc.aio.Server | None = None
        self._watch_task: asyncio.Task[None] | None = None

    async def open(self, socket: Path) -> None:
        max_calls = _MAX_CALLS + 2 * MAX_STREAMS
        server = grpc.aio.server(
            options=[("grpc.max_receive_message_length", 2**16)], maximum_concurrent_rpcs=max_calls
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(Reflection(), server)
        self._health.set_status(serving=self._router.ready)
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        self._server = server
        self._watch_task = start_service("gRPC health", self._watch)

    async def close(self) -> None:
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.gather(self._watch_task, return_exceptions=True)
        if self._server is not None:
            self._health.set_status(serving=False)
            await self._server.stop(grace=0.2)

    async def _watch(self) -> None:
        while True:
            self._health.set_status(serving=self._router.ready)
            await asyncio.sleep(_POLL_SECONDS)


class Reflection:
    """Serves `grpc.reflection.v1alpha.ServerReflection` to a bounded number of concurrent streams."""

    def __init__(self) -> None:
        names = [grpc_messages.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME]
        self._servicer = reflection.aio.ReflectionServicer(names, pool=cast("Any", ServiceDescriptors()))  # type: ignore[attr-defined] # its stubs lack it
        self._streams = StreamLimit("use reflection")

    async def ServerReflectionInfo(  # noqa: N802 - gRPC's own name
        self, request_iterator: AsyncIterator[reflection_pb2.ServerReflectionRequest], context: Context
    ) -> None:
        async with self._streams.slot(context):
            async for response in self._servicer.ServerReflectionInfo(request_iterator, context):
                await context.write(response)


class ServiceDescriptors:
    """Descriptors of all services: a wrapper, because protobuf's descriptor pool cannot be subclassed.

    Some clients ask for the file of a method, which is that of its service. Protobuf's pool finds services only.
    """

    def __init__(self) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        for file in (grpc_messages.FILE, health_pb2.DESCRIPTOR.serialized_pb, reflection_pb2.DESCRIPTOR.serialized_pb):
            self._pool.AddSerializedFile(file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:  # noqa: N802 - the pool's own name
        """File that declares a symbol. Raises KeyError if there is none."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return self._pool.FindServiceByName(symbol.rpartition(".")[0]).file


class StreamLimit:
    """Limit on the concurrent streams of one kind, which the error message names."""

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
    """Serves `grpc.health.v1.Health`, with the same status for each service."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(services)
        self._status = HealthCheckResponse.NOT_SERVING
        self._changed = asyncio.Event()
        self._watches = StreamLimit("watch health")

    def set_status(self, *, serving: bool) -> None:
        status = HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
        if status != self._status:
            self._status = status
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:  # noqa: N802 - gRPC's
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
