"""Server of Open Inference Protocol V2 over REST or gRPC that responds by a script."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests import builders
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol import InferRequest, InferResponse, Parameter, Tensor, rest
from trimtab_protocol.grpc_messages import SERVICE, read_request, response_to_message

SLO_SECONDS = 0.5
MAX_TYPED_BYTES = 2**26


def a_pipeline(payloads: str | None = None) -> InferencePipeline:
    """One echo stage of vectors of any length."""
    shape = {"datatype": "FP32", "shape": [-1]}
    pipeline = builders.a_pipeline(
        [builders.a_stage(outputs=[{"name": "y", **shape}])], inputs=[{"name": "x", **shape}], budget={"cores": 2}
    )
    if payloads:
        pipeline.metadata.annotations["trimtab.dev/payloads"] = payloads
    return pipeline


@dataclass
class FakePipeline:
    """Pipeline that answers request number n by `script(n)`: ok, late, a status, `drop connection` or `garbage`.

    While `open` is clear, no request is answered. `seen` counts requests by outcome, `bodies` the different payloads.
    """

    script: Callable[[int], str] = lambda _: "ok"
    open: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    seen: Counter[str] = field(default_factory=Counter)
    bodies: set[bytes] = field(default_factory=set)
    parameters: list[dict[str, Any]] = field(default_factory=list)
    request_ids: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.open.set()

    async def next_action(self) -> str:
        action = self.script(self.seen.total())
        self.seen[action] += 1
        self.arrived.set()
        await self.open.wait()
        if action == "late":
            await asyncio.sleep(SLO_SECONDS * 1.2)
        return action

    def answer(self, request: InferRequest) -> InferResponse:
        self.bodies.add(request.inputs[0].array.tobytes())
        self.parameters.append(dict(request.parameters))
        y = Tensor.of("y", request.inputs[0].array + np.float32(1))
        parameters: dict[str, Parameter] = {
            "trimtab.first.variant": "echo",
            "trimtab.first.batch_size": 3,
            "trimtab.first.operating_point": "half",
            "trimtab.first.queue_seconds": 0.002,
            "trimtab.first.service_seconds": "long",
            "trimtab.expected_accuracy": 0.75,
        }
        return InferResponse(request.model_name, (y,), parameters=parameters)


@asynccontextmanager
async def rest_server(fake: FakePipeline) -> AsyncIterator[str]:

    async def infer(http: web.Request) -> web.StreamResponse:
        body = await http.read()
        action = await fake.next_action()
        fake.request_ids.add(http.headers["x-request-id"])
        if action == "drop connection":
            assert http.transport is not None
            http.transport.abort()
            return web.Response()
        if action == "garbage":
            return web.Response(body=b"{}")
        if action not in {"ok", "late"}:
            headers = {"x-trimtab-stage": "first", "x-trimtab-reason": "predicted"} if action == "504" else {}
            return web.Response(status=int(action), body=rest.error_body(f"scripted {action}"), headers=headers)
        request = rest.decode_request(http.match_info["model"], body, http.headers.get(rest.HEADER_LENGTH))
        buffers, length = rest.encode_response(
            fake.answer(request), rest.binary_outputs(request, [Tensor.of("y", np.zeros(1))])
        )
        return web.Response(body=b"".join(buffers), headers={rest.HEADER_LENGTH: str(length)})

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v2/models/{model}/infer", infer)
    async with TestServer(app) as server:
        yield f"127.0.0.1:{server.port}"


@asynccontextmanager
async def grpc_server(fake: FakePipeline) -> AsyncIterator[str]:
    """Serve on loopback; yields host:port. Actions are ok, late or a gRPC status name."""

    async def infer(raw: bytes, context: Any) -> bytes:
        action = await fake.next_action()
        assert context.time_remaining() is None
        if action not in {"ok", "late"}:
            metadata = (("x-trimtab-stage", "first"), ("x-trimtab-reason", "past"))
            await context.abort(grpc.StatusCode[action], f"scripted {action}", trailing_metadata=metadata)
        request = read_request(raw, MAX_TYPED_BYTES).decode()
        return bytes(response_to_message(fake.answer(request)).SerializeToString())

    server = grpc.aio.server()
    handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(infer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=0)
