"""gRPC's own services, health and reflection, in a server of their own behind the door."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from trimtab_protocol import grpc_messages
from trimtab_router.ingress.health import MOST_STREAMS, Context, Health, Streams
from trimtab_router.router import Router

_LOOK_SECONDS = 0.5
_MOST_CALLS = 64
"""Calls at once that are answered at once; watches and reflection have bounds of their own beside them."""


class GrpcServices:
    """Answers `grpc.health.v1.Health` and `grpc.reflection.v1alpha.ServerReflection` for a router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._health = Health(("", grpc_messages.SERVICE, router.pipeline.name))
        self._server: grpc.aio.Server | None = None
        self._watching: asyncio.Task[None] | None = None

    async def open(self, socket: Path) -> None:
        """Listen on a Unix socket."""
        most = _MOST_CALLS + 2 * MOST_STREAMS
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", 2**16)], maximum_concurrent_rpcs=most)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(Reflection(), server)
        self._health.tell(serving=self._router.ready)
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        self._server = server
        self._watching = asyncio.get_running_loop().create_task(self._watch(), name="health")

    async def close(self) -> None:
        """End what is watched, and stop."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._server is not None:
            self._health.tell(serving=False)
            await self._server.stop(grace=0.2)

    async def _watch(self) -> None:
        while True:
            self._health.tell(serving=self._router.ready)
            await asyncio.sleep(_LOOK_SECONDS)


class Reflection:
    """Answers `grpc.reflection.v1alpha.ServerReflection` to so many callers at once."""

    def __init__(self) -> None:
        names = [grpc_messages.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME]
        self._answers = reflection.aio.ReflectionServicer(names, pool=cast("Any", ServiceDescriptors()))  # type: ignore[attr-defined] # its stubs lack it
        self._streams = Streams("ask what there is")

    async def ServerReflectionInfo(  # noqa: N802 - gRPC's own name
        self, request_iterator: AsyncIterator[reflection_pb2.ServerReflectionRequest], context: Context
    ) -> None:
        """An answer to each question, as long as the caller goes on asking."""
        async with self._streams.place(context):
            async for answer in self._answers.ServerReflectionInfo(request_iterator, context):
                await context.write(answer)


class ServiceDescriptors:
    """All services of a door, for those who ask what there is: a pool, which cannot be inherited from.

    Some ask for the file of a method, which is its service's; protobuf's own pool knows files of services only.
    """

    def __init__(self) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        for file in (grpc_messages.FILE, health_pb2.DESCRIPTOR.serialized_pb, reflection_pb2.DESCRIPTOR.serialized_pb):
            self._pool.AddSerializedFile(file)

    def __getattr__(self, name: str) -> Any:
        """Whatever else a pool is asked."""
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:  # noqa: N802 - the pool's own name
        """The file that declares a symbol; KeyError where none does."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return self._pool.FindServiceByName(symbol.rpartition(".")[0]).file
