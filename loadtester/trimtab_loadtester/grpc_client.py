"""Client of Open Inference Protocol V2 over gRPC."""

from collections.abc import Mapping
from typing import Any

import grpc

from trimtab_loadtester.clients import OPEN, Access, Client, ClientResponse
from trimtab_protocol import InferRequest, ProtocolError, RequestedOutput, Tensor
from trimtab_protocol.grpc_messages import method_path, request_to_message, response_class, response_from_message

CHANNELS = 4
_MAX_MESSAGE_BYTES = 256 * 2**20


class GrpcClient(Client):
    """gRPC client over `channels` connections; requests are serialized ahead of time."""

    def __init__(self, address: str, model: str, access: Access = OPEN, *, channels: int = CHANNELS) -> None:
        self._channel_count = channels
        self._address = address.removeprefix("grpc://")
        self._credentials = _credentials(access)
        self._metadata = tuple(access.headers.items())
        self._model = model
        self._channels: list[grpc.aio.Channel] = []
        self._calls: list[Any] = []
        self._turn = 0

    def encode(
        self, inputs: tuple[Tensor, ...], outputs: tuple[str, ...], parameters: Mapping[str, Any], request_id: str = ""
    ) -> bytes:
        requested = tuple(RequestedOutput(name) for name in outputs)
        request = InferRequest(self._model, inputs, id=request_id, parameters=parameters, requested_outputs=requested)
        return bytes(request_to_message(request).SerializeToString())

    async def send(self, encoded: bytes, request_id: str = "") -> ClientResponse:
        """Call ModelInfer without a gRPC deadline, which the router would use as the request's deadline."""
        turn = self._turn = (self._turn + 1) % len(self._calls)
        metadata = (("x-request-id", request_id), *self._metadata) if request_id else self._metadata
        try:
            raw = await self._calls[turn](encoded, metadata=metadata)
            return ClientResponse("OK", response_from_message(response_class("ModelInfer").FromString(raw)))
        except grpc.aio.AioRpcError as error:
            return _grpc_error(error, self._channels[turn].get_state())
        except ProtocolError as error:
            return ClientResponse("ProtocolError", detail=str(error))

    async def open(self) -> None:
        options = [
            ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self._channels = [self._channel(options) for _ in range(self._channel_count)]
        self._calls = [channel.unary_unary(method_path("ModelInfer"), None, None) for channel in self._channels]

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close(None)

    def _channel(self, options: list[tuple[str, int]]) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._address, options=options)
        return grpc.aio.secure_channel(self._address, self._credentials, options=options)


def _credentials(access: Access) -> grpc.ChannelCredentials | None:
    """Credentials of a channel; None for plain text."""
    return None if access.ca_file is None else grpc.ssl_channel_credentials(access.ca_file.read_bytes())


def _grpc_error(error: grpc.aio.AioRpcError, connection: grpc.ChannelConnectivity) -> ClientResponse:
    """Read a status. gRPC reports a lost connection as UNAVAILABLE too; only a status from the server is a refusal."""
    pairs: Any = error.trailing_metadata() or ()
    metadata = {str(key): str(value) for key, value in pairs}
    name = str(error.code().name)
    if name == "UNAVAILABLE" and not metadata and connection is not grpc.ChannelConnectivity.READY:
        name = "ConnectionLost"
    return ClientResponse(name, detail=error.details() or "", headers=metadata)
