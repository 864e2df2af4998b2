"""HTTP and gRPC clients of a proxy, in plain text or TLS, with arbitrary headers."""

import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc

from tests.router.fakes import Rig, a_request
from trimtab_protocol import grpc_messages

JSON_BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}).encode()
PATH = "/v2/models/sample/infer"
Headers = Mapping[str, str]


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
