"""Limits per client at a real Envoy, and its timeouts."""

import asyncio
import contextlib
import random
from typing import Any

import grpc

from tests.router.envoy.http_clients import JSON_BODY, PATH, call, code, post
from tests.router.envoy.test_api_keys import line
from tests.router.fakes import Rig, a_rig, grpc_refusal
from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_protocol import grpc_messages
from trimtab_router.envoy.api_keys import new_key
from trimtab_router.envoy.route_discovery import MAX_BUFFERED_BYTES
from trimtab_router.limits import MEBIBYTE, Limits

HEAD = f"POST {PATH} HTTP/1.1\r\nhost: proxy\r\ncontent-type: application/json\r\n".encode()


def settings(**changes: Any) -> EdgeSettings:
    return EdgeSettings.model_validate(changes)


async def connect(rig: Rig, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", (await rig.proxy()).rest_port)
    writer.write(sent)
    return reader, writer


async def exchange(rig: Rig, sent: bytes) -> bytes:
    """Send bytes, and return all that comes until the proxy closes the connection."""
    reader, writer = await connect(rig, sent)
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    return answer


async def test_rate_limit_applies_to_one_client_only(tmp_path):
    keys, alice, bob = tmp_path / "keys", new_key(), new_key()
    keys.write_text(line("alice", alice) + line("bob", bob))
    edge = settings(keysFile=str(keys), clients={"requestsPerSecond": 0.01, "burst": 3})
    async with a_rig(edge=edge) as rig:
        assert [(await post(rig, ("x-api-key", alice))).status for _ in range(3)] == [200] * 3
        refused = await post(rig, ("x-api-key", alice))
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert refused.headers["x-trimtab-reason"] == "ClientRateLimited"
        assert refused.error == "this client sends more requests than it may"
        reply = await call(rig, ("x-api-key", alice))
        assert reply == "RESOURCE_EXHAUSTED: this client sends more requests than it may"
        assert [await code(rig, ("x-api-key", bob)) for _ in range(3)] == ["OK"] * 3
        assert await code(rig, ("x-api-key", bob)) == "RESOURCE_EXHAUSTED"
        assert (await post(rig, ("x-api-key", new_key()))).status == 401


async def test_address_is_the_client_without_authentication():
    edge = settings(clients={"requestsPerSecond": 0.01, "burst": 2})
    async with a_rig(edge=edge) as rig:
        statuses = []
        for number in range(4):
            own = (("x-trimtab-client", f"key:{number}"), ("x-forwarded-for", f"10.0.0.{number}"))
            statuses.append((await post(rig, *own)).status)
        assert statuses == [200, 200, 429, 429]


async def test_slow_body_is_refused_and_closed():
    edge = settings(timeouts={"body": "500ms"})
    async with a_rig(edge=edge) as rig:
        answer = await exchange(rig, HEAD + b"content-length: 1000\r\n\r\n" + b"{" * 500)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"x-trimtab-reason: RequestTimeout" in answer
        assert answer.endswith(b'{"error":"the request did not arrive in time"}\n')
        assert rig.router.admission.memory.bytes_in_flight == 0
        slow = (await rig.channel()).stream_unary(grpc_messages.method_path("ModelInfer"), None, None)
        refusal = await grpc_refusal(slow(timeout=60))  # type: ignore[call-arg]
        assert refusal == (grpc.StatusCode.DEADLINE_EXCEEDED, "the request did not arrive in time")


async def test_a_body_over_the_limit_is_refused_before_it_is_there():
    limits = Limits(max_payload_bytes=MEBIBYTE)
    async with a_rig(limits=limits) as rig:
        chunk = b"40000\r\n" + bytes(2**18) + b"\r\n"  # four fit
        answer = await exchange(rig, HEAD + b"transfer-encoding: chunked\r\n\r\n" + 4 * chunk + chunk[:9])
        assert answer.startswith(b"HTTP/1.1 413 "), answer[:200]
        assert b"x-trimtab-reason: PayloadTooLarge" in answer
        assert rig.router.admission.memory.bytes_in_flight == 0
        message = (await rig.channel()).unary_unary(grpc_messages.method_path("ModelInfer"), None, None)
        refusal = await grpc_refusal(message(bytes(2 * MEBIBYTE)))
        too_large = "the body is too large; at most 1048576 bytes are accepted"
        assert refusal == (grpc.StatusCode.RESOURCE_EXHAUSTED, too_large)


async def keep_uploading_slowly(rig: Rig) -> None:
    """Send large bodies a byte at a time; each time one is cut, begin again, not at the same moment as all others."""
    while True:
        await asyncio.sleep(random.uniform(0.0, 1.0))
        reader, writer = await connect(rig, HEAD + b"content-length: 1000000\r\n\r\n")
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b" ")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await reader.read(1000)


async def test_slow_uploads_displace_no_other_requests(rig):
    """Although all come from one address."""
    await rig.proxy()
    large = JSON_BODY + b" " * MAX_BUFFERED_BYTES
    statuses = []
    attackers = [asyncio.create_task(keep_uploading_slowly(rig)) for _ in range(250)]
    try:
        await rig.until(lambda: rig.value("trimtab_requests_in_flight") > 100)
        for _ in range(20):
            statuses.append((await post(rig, body=large)).status)
            statuses.append((await post(rig)).status)
            await asyncio.sleep(0.05)
    finally:
        for attacker in attackers:
            attacker.cancel()
        await asyncio.gather(*attackers, return_exceptions=True)

    assert statuses == [200] * 40


async def test_grpc_over_http1_is_refused_at_once(rig):
    """It would be held at the door until it is whole, and nothing would bound what all of them hold together."""
    lines = b"content-type: application/grpc\r\nte: trailers\r\nx-trimtab-http: HTTP/2\r\n"
    framings = (b"content-length: 20000000\r\n\r\n" + bytes(1000), b"transfer-encoding: chunked\r\n\r\n")
    for method in ("/inference.GRPCInferenceService/ModelInfer", "/grpc.health.v1.Health/Check"):
        for framing in framings:
            begun = f"POST {method} HTTP/1.1\r\nhost: proxy\r\n".encode() + lines + framing
            reader, writer = await connect(rig, begun)
            async with asyncio.timeout(10):  # a body that never comes would be waited for until its time is up
                answer = await reader.readuntil(b"\r\n\r\n")
            assert b"\r\ngrpc-status: 3\r\n" in answer, answer
            assert b"\r\ngrpc-message: gRPC requires HTTP/2\r\n" in answer
            assert b"\r\nx-trimtab-reason: Malformed\r\n" in answer
            writer.close()
    assert await code(rig, ("x-trimtab-http", "HTTP/1.1")) == "OK"
    assert (await post(rig)).status == 200


async def test_a_tunnel_is_refused_at_once(rig):
    _, writer = opened = await connect(rig, b"CONNECT elsewhere:1 HTTP/1.1\r\nhost: elsewhere:1\r\n\r\n")
    async with asyncio.timeout(10):  # a body that never ends would be waited for until its time is up
        assert (await opened[0].readline()).startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 405 "))
    writer.close()
