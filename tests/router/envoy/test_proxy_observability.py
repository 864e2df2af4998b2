"""Counts, access log and traces of requests that Envoy rejects or forwards."""

import asyncio
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.router.envoy.http_clients import call, code, post
from tests.router.envoy.test_api_keys import line
from tests.router.envoy.test_client_limits import HEAD, exchange, settings
from tests.router.envoy.test_streams import set_large_request_limit
from tests.router.fakes import Rig, a_request, a_rig, grpc_refusal
from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_protocol import grpc_messages
from trimtab_router.envoy.api_keys import new_key
from trimtab_router.limits import MEBIBYTE, Limits
from trimtab_router.observability.tracing import ENDPOINT_VARIABLE, collector_address, create_tracer


def refused(rig: Rig) -> dict[tuple[str, str], int]:
    found = {}
    for family in rig.router.metrics.registry.collect():
        for sample in family.samples:
            if sample.name == "trimtab_refusals_total" and sample.value:
                found[sample.labels["code"], sample.labels["reason"]] = int(sample.value)
    return found


async def scraped(rig: Rig) -> dict[str, int]:
    await rig.get("/metrics")
    return await rig.outcomes()


async def test_envoy_keeps_only_used_statistics(rig):
    assert [(await post(rig)).status, (await post(rig, path="/nowhere")).status] == [200, 404]
    connector = aiohttp.UnixConnector(str(rig.sockets.envoy_admin))
    async with aiohttp.ClientSession(connector=connector) as session, session.get("http://envoy/stats") as answer:
        names = {line.partition(":")[0] for line in (await answer.text()).splitlines()}
    assert {"http.proxy.downstream_rq_total", "cluster.requests.upstream_rq_total", "server.live"} <= names
    assert any(name.startswith("proxy.answered.") for name in names)
    assert not [name for name in names if name.endswith(("rq_time", "length_ms", "rq_2xx", "rq_200"))]


@pytest.mark.parametrize(
    ("method", "path", "status", "reason"),
    [
        ("GET", "/v3", 404, "NotFound"),
        ("POST", "/v2/models/sample/nope", 404, "NotFound"),
        ("GET", "/v2/models/sample/infer", 405, "MethodNotAllowed"),
        ("POST", "/v1/images/generations", 404, "NotFound"),
        ("POST", "/v1/embeddings", 404, "RouteNotServed"),
        ("GET", "/v1/chat/completions", 405, "MethodNotAllowed"),
    ],
)
async def test_unknown_paths_have_a_reason_and_are_counted(rig, method: str, path: str, status: int, reason: str):
    root = f"http://127.0.0.1:{(await rig.proxy()).rest_port}"
    for known in ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/sample", "/v1/models"):
        async with rig.session.get(root + known) as answer:
            assert answer.status == 200
    assert await scraped(rig) == {}

    async with rig.session.request(method, root + path) as answer:
        assert (answer.status, answer.headers.get("x-trimtab-reason")) == (status, reason)
    assert await scraped(rig) == {"refused": 1}
    assert refused(rig) == {({404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED"}[status], reason): 1}
    assert rig.value("trimtab_client_errors_total") == 1


async def test_proxy_rejections_are_counted_with_reasons(tmp_path):
    keys, alice, bob = tmp_path / "keys", new_key(), new_key()
    keys.write_text(line("alice", alice) + line("bob", bob, "another"))
    edge = settings(
        keysFile=str(keys), clients={"requestsPerSecond": 0.01, "burst": 8}, timeouts={"headers": "5s", "body": "500ms"}
    )
    known = ("x-api-key", alice)
    limits = Limits(max_payload_bytes=MEBIBYTE)
    async with a_rig(edge=edge, limits=limits) as rig:
        served = [(await post(rig, known)).status, await code(rig, known)]
        assert served == [200, "OK"]
        assert await scraped(rig) == {"ok": 2}
        assert (await post(rig)).status == 401
        assert await code(rig) == "UNAUTHENTICATED"
        assert (await post(rig, ("x-api-key", bob))).status == 403
        assert await code(rig, ("x-api-key", bob)) == "PERMISSION_DENIED"
        shown = f"x-api-key: {alice}\r\n".encode()
        assert (await exchange(rig, HEAD + shown + b"content-length: 1073741824\r\n\r\n")).startswith(b"HTTP/1.1 413")
        method = (await rig.channel()).unary_unary(grpc_messages.method_path("ModelInfer"), None, None)
        await grpc_refusal(method(bytes(2 * MEBIBYTE), metadata=[known]))
        assert (await exchange(rig, HEAD + shown + b"content-length: 100\r\n\r\n")).startswith(b"HTTP/1.1 408")
        large = HEAD + b"x-large: " + b"x" * 20_000 + b"\r\ncontent-length: 0\r\n\r\n"
        assert (await exchange(rig, large)).startswith(b"HTTP/1.1 431")
        assert (await exchange(rig, b"POST / HTTP/1.1\r\nhost: a\r\nno header\r\n\r\n")).startswith(b"HTTP/1.1 400")
        unknown = (await rig.channel()).unary_unary("/no.such.Service/Method", None, None)
        await grpc_refusal(unknown(b"", metadata=[known]))
        while (await post(rig, known)).status != 429:
            pass
        assert await code(rig, known) == "RESOURCE_EXHAUSTED"
        ok = int(rig.value("trimtab_requests_total", outcome="ok"))
        assert await scraped(rig) == {"ok": ok, "refused": 12}
        assert refused(rig) == {
            ("UNAUTHENTICATED", "Unauthenticated"): 2,
            ("PERMISSION_DENIED", "Forbidden"): 2,
            ("PAYLOAD_TOO_LARGE", "PayloadTooLarge"): 2,
            ("REQUEST_TIMEOUT", "RequestTimeout"): 1,
            ("INVALID_ARGUMENT", "HeadersTooLarge"): 1,
            ("INVALID_ARGUMENT", "Malformed"): 1,
            ("NOT_FOUND", "NotFound"): 1,
            ("RESOURCE_EXHAUSTED", "ClientRateLimited"): 2,
        }
        assert rig.value("trimtab_client_errors_total") == 12
        assert sum(rig.router.arrivals.history(time.time() + 1.0, 600)) == ok, "who may not come is no load to plan for"


async def test_rejections_are_counted_without_a_scrape(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(line("alice", new_key()))
    async with a_rig(edge=EdgeSettings(keys_file=str(keys))) as rig:
        assert await code(rig) == "UNAUTHENTICATED"
        await rig.until(lambda: refused(rig) == {("UNAUTHENTICATED", "Unauthenticated"): 1})


async def test_excess_requests_are_overload_and_planned_for(rig, replica):
    assert (await post(rig)).status == 200
    await set_large_request_limit(rig, 1)
    replica.gate.clear()
    replica.arrived.clear()
    first = asyncio.create_task(post(rig))
    await replica.arrived.wait()
    beside = [asyncio.create_task(post(rig)) for _ in range(2)]  # one of them may wait for a connection
    done, _ = await asyncio.wait(beside, return_when=asyncio.FIRST_COMPLETED)
    turned = done.pop().result()
    assert (turned.status, turned.headers["retry-after"]) == (429, "1")
    assert turned.headers["x-trimtab-reason"] == "Overload"
    assert "overloaded" in turned.error
    assert (await call(rig)).startswith("RESOURCE_EXHAUSTED: the router is overloaded")
    replica.gate.set()
    assert (await first).status == 200
    statuses = [(await one).status for one in beside]
    outcomes = await scraped(rig)
    assert outcomes["refused"] == 1 + statuses.count(429)
    assert refused(rig) == {("RESOURCE_EXHAUSTED", "Overload"): outcomes["refused"]}
    assert sum(rig.router.arrivals.history(time.time() + 1.0, 600)) == sum(outcomes.values())


async def test_rejections_of_an_absent_router_are_counted_later(rig):
    assert (await post(rig)).status == 200
    requests = rig.listeners.request_listeners[-1]
    await requests.stop_listening()
    await requests.close()
    away = await post(rig)
    assert (away.status, away.headers["retry-after"]) == (503, "1")
    assert away.headers["x-trimtab-reason"] == "RouterUnavailable"
    assert await call(rig) == "UNAVAILABLE: the router is unavailable; try again"
    assert await scraped(rig) == {"ok": 1, "refused": 2}
    assert refused(rig) == {("UNAVAILABLE", "RouterUnavailable"): 2}


async def lines_of(rig: Rig, enough: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    assert rig.sockets is not None
    log, found = rig.sockets.folder / "envoy.log", list[dict[str, Any]]()
    async with asyncio.timeout(60):
        while not enough(found):
            await asyncio.sleep(0.05)
            found = [json.loads(text) for text in log.read_text().splitlines() if text.startswith("{")]
    return found


async def test_access_log_has_one_line_per_request_and_no_secret(tmp_path):
    keys, key, secret = tmp_path / "keys", new_key(), "s3cr3t"
    keys.write_text(line("alice", key))
    edge = settings(keysFile=str(keys), accessLog="All")
    async with a_rig(edge=edge) as rig:
        await post(rig, ("x-api-key", key), ("x-request-id", "mine"), path=f"/v2/models/sample/infer?key={secret}")
        await post(rig, ("authorization", f"Bearer {secret}"), ("cookie", secret), body=secret.encode())
        await call(rig, ("authorization", f"Bearer {key}"))
        await call(rig, ("x-api-key", secret))
        await post(rig, ("x-api-key", key), ("x-request-id", 'a"b\\' + "x" * 200), body=b"{")
        lines = await lines_of(rig, lambda found: len(found) >= 5)
        text = json.dumps(lines)
        assert secret not in text
        assert key not in text
        served, unknown, called, uncalled, bad = lines
        assert (served["client"], served["path"], served["status"]) == ("key:alice", "/v2/models/sample/infer", 200)
        assert (served["request_id"], served["method"], served["protocol"]) == ("mine", "POST", "HTTP/1.1")
        assert served["from"] == "127.0.0.1"
        assert served["received_bytes"] > 0 < served["sent_bytes"]
        assert served["milliseconds"] >= served["router_milliseconds"] >= 0
        assert (unknown["client"], unknown["status"], unknown["reason"]) == (None, 401, "Unauthenticated")
        assert (called["grpc_status"], called["protocol"]) == ("OK", "HTTP/2")
        assert (uncalled["grpc_status"], uncalled["reason"]) == ("Unauthenticated", "Unauthenticated")
        assert (bad["status"], bad["reason"]) == (400, "InvalidArgument")
        assert len(bad["request_id"]) <= 128


@pytest.mark.parametrize(("which", "reply"), [("Off", 0), ("Refused", 3)])
async def test_the_log_has_lines_of_what_was_refused_or_none(which, reply):
    async with a_rig(edge=settings(accessLog=which)) as rig:
        await post(rig)
        await call(rig)
        await post(rig, body=b"{")
        unknown = (await rig.channel()).unary_unary("/no.such.Service/Method", None, None)
        await grpc_refusal(unknown(b""))
        await grpc_refusal(rig.grpc(a_request(model_name="other")))
        lines = await lines_of(rig, lambda found: len(found) >= reply)
        assert [line["reason"] for line in lines] == ["InvalidArgument", "NotFound", "UnknownModel"][:reply]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans over gRPC."""

    def __init__(self) -> None:
        self.spans: dict[str, list[Any]] = {}

    def Export(self, request, _):  # noqa: N802
        for resource in request.resource_spans:
            names = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans.setdefault(names["service.name"], []).extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_trace_spans_envoy_and_router(monkeypatch):
    taken = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(taken, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv(ENDPOINT_VARIABLE, f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    tracer = create_tracer("sample")
    otlp = collector_address(os.environ[ENDPOINT_VARIABLE])
    async with a_rig(tracer=tracer, otlp=otlp) as rig:
        assert (await post(rig)).status == 200
        assert await call(rig) == "OK"
        await rig.until(lambda: len(taken.spans.get("trimtab-router-sample", ())) == 4)
        await rig.until(lambda: len(taken.spans.get("trimtab-proxy-sample", ())) >= 2)
    server.stop(None)
    door = {span.span_id: span for span in taken.spans["trimtab-proxy-sample"]}
    routed = taken.spans["trimtab-router-sample"]
    served = [span for span in routed if span.name == "infer"]
    assert len({span.trace_id for span in served}) == 2
    for span in served:
        assert door[span.parent_span_id].trace_id == span.trace_id
        assert [child.trace_id for child in routed if child.parent_span_id == span.span_id] == [span.trace_id]
