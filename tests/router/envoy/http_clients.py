"""HTTP and gRPC clients of a proxy, in plain text or TLS, and a fake router behind one."""

import json
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from aiohttp import web

from tests.router.fakes import Rig, a_pipeline, a_request, an_envoy
from trimtab.local.envoy_process import EnvoyPorts, make_sockets
from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_protocol import grpc_messages
from trimtab_router.envoy.api_keys import HashedKey
from trimtab_router.ingress.listeners import EnvoyControl, Listener

JSON_BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}).encode()
PATH = "/v2/models/sample/infer"


@dataclass
class Reply:
    """What came back over REST."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def error(self) -> str:
        return str(json.loads(self.body)["error"])


def trusting(authority: Path, certificate: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority))
    if certificate is not None:
        context.load_cert_chain(certificate, key)
    return context


async def post(
    rig: Rig,
    *headers: tuple[str, str],
    body: Any = JSON_BODY,
    path: str = PATH,
    tls: ssl.SSLContext | None = None,
    session: aiohttp.ClientSession | None = None,
) -> Reply:
    url = f"{'http' if tls is None else 'https'}://127.0.0.1:{(await rig.proxy()).rest_port}{path}"
    sending = (session or rig.session).post(url, data=body, headers=headers, ssl=True if tls is None else tls)
    async with sending as answer:
        return Reply(answer.status, answer.headers, await answer.read())


async def call(rig: Rig, *metadata: tuple[str, str], channel: grpc.aio.Channel | None = None) -> str:
    """Send one gRPC call to the door; the name of its status, with the words where it is not OK."""
    message = grpc_messages.request_to_message(a_request()).SerializeToString()
    asked = (channel or await rig.channel()).unary_unary(grpc_messages.method_path("ModelInfer"), None, None)
    try:
        await asked(message, metadata=metadata, timeout=60)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return "OK"


async def code(rig: Rig, *metadata: tuple[str, str], channel: grpc.aio.Channel | None = None) -> str:
    return (await call(rig, *metadata, channel=channel)).partition(":")[0]


@asynccontextmanager
async def a_fake_router(
    handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
    settings: EdgeSettings,
    keys: Sequence[HashedKey] = (),
) -> AsyncIterator[EnvoyPorts]:
    """Run a proxy before a server that answers in place of the router."""
    sockets = make_sockets()
    control = EnvoyControl(settings, namespace="default", pipeline="sample", max_seconds=60)
    control.use_keys(keys)
    listening = [Listener(web.Server(handler)), Listener(control.server())]
    try:
        await listening[0].on_socket(sockets.requests)
        await listening[1].on_socket(sockets.control)
        async with an_envoy(a_pipeline(1), sockets, settings) as ports:
            yield ports
    finally:
        for server in listening:
            await server.close()
        shutil.rmtree(sockets.folder)
