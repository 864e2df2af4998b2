"""The generator of benchmarks.overload keeps to its schedule, and accounts for every request from when it was due."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import cast

import grpc
import psutil
import pytest
from aiohttp import web

from benchmarks.harness.report import Report
from benchmarks.overload.__main__ import Phase, measure
from benchmarks.overload.driver import Case, Generator, Target, watch_cpu
from benchmarks.overload.generator import Offer, Protocol, run_offer
from benchmarks.overload.outcomes import ABANDONED, CONNECTION_CLOSED, GRPC, OK, OfferSummary, Outcomes, summarize
from trimtab_protocol.grpc_messages import method_path

SECONDS, RATE_RPS, PATIENT_SECONDS = 1.0, 300.0, 20.0


@contextmanager
def http_server(refuse_every: int = 0, *, hang_up: bool = False) -> Iterator[int]:
    """A plain HTTP/1.1 server; answers every n-th request with 429, and closes the connection after each if asked."""
    loop, started, ports = asyncio.new_event_loop(), threading.Event(), []
    asked = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        await request.read()
        response = web.Response(status=429 if refuse_every and asked % refuse_every == 0 else 200, body=b"y" * 4096)
        if hang_up:
            response.force_close()
        return response

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v2/models/echo/infer", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports.append(runner.addresses[0][1])
        started.set()
        return runner

    def run() -> None:
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    yield ports[0]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@contextmanager
def grpc_server(refuse_every: int = 0) -> Iterator[int]:
    """A gRPC server of grpcio's own; answers every n-th call with RESOURCE_EXHAUSTED."""
    asked = 0

    def answer(message: bytes, context: grpc.ServicerContext) -> bytes:
        nonlocal asked
        asked += 1
        if refuse_every and asked % refuse_every == 0:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many")
        return message

    class Echo(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
        def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
            assert details.method == method_path("ModelInfer")
            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[Echo()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(None).wait()


def an_offer(protocol: Protocol, port: int, connections: int = 4, slo_seconds: float = PATIENT_SECONDS) -> Offer:
    return Offer(protocol, port, connections, RATE_RPS, SECONDS, slo_seconds)


@pytest.mark.parametrize("hang_up", [False, True])
def test_every_request_over_http1_has_its_code(hang_up):
    with http_server(refuse_every=3, hang_up=hang_up) as port:
        summary = run_offer(an_offer("http1", port))
    total = sum(summary.codes.values())
    assert set(summary.codes) == {"ok", "429"}
    assert summary.codes["429"] == total // 3
    assert summary.offered_rps == pytest.approx(total / SECONDS, abs=0.1)


def test_every_call_over_grpc_has_its_code():
    with grpc_server(refuse_every=3) as port:
        summary = run_offer(an_offer("grpc", port))
    total = sum(summary.codes.values())
    assert set(summary.codes) == {"ok", "RESOURCE_EXHAUSTED"}
    assert summary.codes["RESOURCE_EXHAUSTED"] == total // 3


def test_the_same_seed_offers_the_same_schedule():
    with http_server() as port:
        counts = {sum(run_offer(an_offer("http1", port)).codes.values()) for _ in range(2)}
    assert len(counts) == 1


def test_request_without_a_connection_is_not_offered():
    """One connection to a server that never responds: the other requests wait for the connection."""
    held = asyncio.Event()

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await held.wait()
        writer.close()

    async def measure() -> OfferSummary:
        server = await asyncio.start_server(never, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        summary = await asyncio.to_thread(run_offer, an_offer("http1", port, connections=1, slo_seconds=0.2))
        held.set()
        server.close()
        return summary

    summary = asyncio.run(measure())
    assert summary.codes["no_response"] == 1
    assert summary.codes["abandoned"] == sum(summary.codes.values()) - 1
    assert summary.offered_rps == pytest.approx(1 / SECONDS)


def test_latency_runs_from_the_moment_a_request_was_due():
    outcomes = Outcomes([10.0, 10.0, 10.0, 10.0, 10.0])
    for index, (sent, code, ended) in enumerate(
        [(10.0, OK, 10.1), (10.3, OK, 10.6), (10.0, GRPC + 14, 10.1), (10.0, CONNECTION_CLOSED, 10.2)]
    ):
        outcomes.begin(index, sent)
        outcomes.end(index, code, ended)
    outcomes.codes[4] = ABANDONED
    summary = summarize(outcomes, seconds=2.0, slo_seconds=0.5)
    assert summary.codes == {"ok": 1, "late": 1, "UNAVAILABLE": 1, "connection_closed": 1, "abandoned": 1}
    assert (summary.offered_rps, summary.goodput_rps) == (2.0, 0.5)
    assert [summary.p99_ms, summary.lag_p99_ms] == pytest.approx([600, 300])


def test_cpu_time_of_each_process_is_reported():
    idle = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before = psutil.Process(busy.pid).cpu_times().user
        with watch_cpu(idle.pid, {"proxy": busy.pid}) as usage:
            while psutil.Process(busy.pid).cpu_times().user < before + 0.2:
                time.sleep(0.02)
    finally:
        busy.kill()
        idle.communicate(b"\n")
        busy.wait()
    assert usage.shares["proxy"] > usage.shares["generator"]


class StuckTarget:
    """A generator whose target serves nothing in time after the first overload."""

    pid = os.getpid()

    def __init__(self) -> None:
        self.offered_rps: list[float] = []

    def max_goodput_rps(self, *_: object) -> float:
        return 100.0

    def recheck_max_goodput_rps(self, *_: object) -> float:
        return 0.0

    def offer(self, _case: object, _port: int, rate_rps: float, _seconds: float) -> OfferSummary:
        self.offered_rps.append(rate_rps)
        return OfferSummary(rate_rps, 1.0, 1.0, 1.0, 1.0, {})


async def test_target_that_does_not_recover_keeps_its_old_maximum():
    report, stuck = Report("overload"), StuckTarget()
    phase = Phase("stuck", "stuck", 1, (Case("grpc", "grpc", 1),))
    await measure(phase, Target({"grpc": 1}), cast("Generator", stuck), (3.0, 10.0), 1.0, report)

    assert stuck.offered_rps == [300.0, 1000.0]
    assert report.figures["stuck_grpc_1_10x_kept"] == 0.01
