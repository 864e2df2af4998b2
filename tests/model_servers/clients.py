"""Clients of the data port and of MLServer's own ports."""

import io
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
import numpy as np

from trimtab_pipelines.processes.child_process import ReplicaPorts
from trimtab_protocol import InferRequest, InferResponse, Tensor, grpc_messages
from trimtab_protocol.rest import HEADER_LENGTH, decode_response, encode_request


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call gave: the HTTP status with the answer, or with the error's text."""

    status: int
    response: InferResponse | None = None
    error: str = ""

    @property
    def y(self) -> Any:
        assert self.response is not None, self.error
        return self.response.outputs[0].array


def a_request(model: str, *tensors: Tensor, **parameters: bool | float | str) -> InferRequest:
    return InferRequest(model, tensors, parameters={"binary_data_output": True} | parameters)


def x(array: Any, name: str = "x") -> Tensor:
    return Tensor.of(name, np.asarray(array, np.float32))


async def call(session: aiohttp.ClientSession, ports: ReplicaPorts, request: InferRequest) -> Answer:
    buffers, length = encode_request(request)
    return await post(session, ports, request.model_name, io.BytesIO(b"".join(buffers)), {HEADER_LENGTH: str(length)})


async def post(
    session: aiohttp.ClientSession, ports: ReplicaPorts, model: str, body: Any, headers: dict[str, str]
) -> Answer:
    url = f"http://127.0.0.1:{ports.data_port}/v2/models/{model}/infer"
    async with session.post(url, data=body, headers=headers) as answer:
        content = await answer.read()
        if answer.status != 200:
            return Answer(answer.status, error=(await answer.json(content_type=None))["error"])
        return Answer(200, decode_response(content, answer.headers.get(HEADER_LENGTH)))


async def call_mlserver_rest(
    session: aiohttp.ClientSession, ports: ReplicaPorts, model: str, payload: Any
) -> tuple[int, Any]:
    url = f"http://127.0.0.1:{ports.http_port}/v2/models/{model}/infer"
    async with session.post(url, json=payload) as answer:
        return answer.status, await answer.json(content_type=None)


async def call_mlserver_grpc(ports: ReplicaPorts, request: InferRequest) -> InferResponse:
    """Infer through MLServer's gRPC port; raises grpc.aio.AioRpcError where it refuses."""
    return grpc_messages.response_from_message(
        await call_mlserver_grpc_raw(ports, grpc_messages.request_to_message(request))
    )


async def call_mlserver_grpc_raw(ports: ReplicaPorts, message: Any) -> Any:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc_port}") as channel:
        infer = channel.unary_unary(
            grpc_messages.method_path("ModelInfer"),
            request_serializer=lambda sent: sent.SerializeToString(),
            response_deserializer=grpc_messages.response_class("ModelInfer").FromString,
        )
        return await infer(message, timeout=20)


def packed(model: str, array: Any, **parameters: bool) -> Any:
    """A request whose tensor is one BYTES element, its datatype and shape in parameters."""
    array = np.ascontiguousarray(array)
    message = grpc_messages.request_class("ModelInfer")(model_name=model)
    entry = message.inputs.add(name="x", datatype="BYTES", shape=[1])
    entry.contents.bytes_contents.append(array.tobytes())
    entry.parameters["datatype"].string_param = "FP32"
    entry.parameters["shape"].string_param = ",".join(map(str, array.shape))
    for name, value in parameters.items():
        message.parameters[name].bool_param = value
    return message
