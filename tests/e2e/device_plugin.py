"""Kubelet device plugin that offers devices which do not exist, and reports their health (API v1beta1).

Messages are declared in a descriptor pool of their own.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message_factory import GetMessageClass

FOLDER = Path("/var/lib/kubelet/device-plugins")
"""Of every kubelet, whatever its root directory."""
PACKAGE = "v1beta1"
MESSAGES = {
    "Empty": (),
    "RegisterRequest": ("version", "endpoint", "resource_name"),
    "Device": ("ID", "health"),
    "ListAndWatchResponse": ("Device devices",),
    "ContainerAllocateRequest": ("string devices_ids",),
    "AllocateRequest": ("ContainerAllocateRequest container_requests",),
    "ContainerAllocateResponse": (),
    "AllocateResponse": ("ContainerAllocateResponse container_responses",),
}
"""Fields in the order of their numbers; those with a type are repeated."""


def _declared() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="device_plugin.proto", package=PACKAGE, syntax="proto3")
    kind = descriptor_pb2.FieldDescriptorProto
    for message, fields in MESSAGES.items():
        declared = file.message_type.add(name=message)
        for number, (of, _, name) in enumerate((each.rpartition(" ") for each in fields), start=1):
            label = kind.LABEL_REPEATED if of else kind.LABEL_OPTIONAL
            own = of not in {"", "string"}
            typed = {"type": kind.TYPE_MESSAGE, "type_name": f".{PACKAGE}.{of}"} if own else {"type": kind.TYPE_STRING}
            declared.field.add(name=name, number=number, label=label, **typed)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in MESSAGES}


TYPES = _declared()


@dataclass(slots=True)
class DevicePlugin:
    """Devices of one extended resource, by id."""

    resource: str
    healthy: dict[str, bool]
    allocated: list[str] = field(default_factory=list)
    """In the order of their allocations."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def set_health(self, device: str, *, healthy: bool) -> None:
        self.healthy[device] = healthy
        self._changed.set()

    @asynccontextmanager
    async def registered(self) -> AsyncIterator[None]:
        """Offer the devices to the kubelet while the block runs."""
        server, socket = grpc.aio.server(), FOLDER / f"{self.resource.replace('/', '-')}.sock"
        socket.unlink(missing_ok=True)
        server.add_generic_rpc_handlers((self._handlers(),))
        server.add_insecure_port(f"unix://{socket}")
        await server.start()
        request = TYPES["RegisterRequest"](version=PACKAGE, endpoint=socket.name, resource_name=self.resource)
        async with grpc.aio.insecure_channel(f"unix://{FOLDER / 'kubelet.sock'}") as channel:
            register = channel.unary_unary(f"/{PACKAGE}.Registration/Register", None, None)
            await register(request.SerializeToString(), timeout=10)
        try:
            yield
        finally:
            await server.stop(grace=0)
            socket.unlink(missing_ok=True)

    def _handlers(self) -> "grpc.GenericRpcHandler[Any, Any]":
        empty = grpc.unary_unary_rpc_method_handler(self._empty)
        handlers = {
            "GetDevicePluginOptions": empty,
            "PreStartContainer": empty,
            "Allocate": grpc.unary_unary_rpc_method_handler(self._allocate),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(self._list),
        }
        return grpc.method_handlers_generic_handler(f"{PACKAGE}.DevicePlugin", handlers)

    async def _empty(self, _: bytes, __: Any) -> bytes:
        return b""

    async def _allocate(self, data: bytes, _: Any) -> bytes:
        requests = TYPES["AllocateRequest"].FromString(data).container_requests
        self.allocated += [device for request in requests for device in request.devices_ids]
        responses = [TYPES["ContainerAllocateResponse"]() for _ in requests]
        return bytes(TYPES["AllocateResponse"](container_responses=responses).SerializeToString())

    async def _list(self, _: bytes, __: Any) -> AsyncIterator[bytes]:
        while True:
            self._changed.clear()
            devices = [
                TYPES["Device"](ID=device, health="Healthy" if healthy else "Unhealthy")
                for device, healthy in self.healthy.items()
            ]
            yield TYPES["ListAndWatchResponse"](devices=devices).SerializeToString()
            await self._changed.wait()
