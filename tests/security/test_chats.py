"""Hostile chats to a served model, with Envoy and without: response, and the router's memory and processor time.

tests/router/test_chats.py sends them to a router in the process of the test.
"""

import asyncio
import itertools
import json
import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import median
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks.harness.processors import cpu_seconds
from tests.figures import Figures
from tests.local_run import chat_pipeline, chat_plan, post, until, up
from tests.security import raw_http
from tests.security.attacks import BURDENING, FETCHED, READ, SHOWN, SPELLED, Attack, Ground, a_small_png, chat
from tests.security.conftest import HOSTILE_NICENESS, MEBIBYTE, Server, forget_peak_memory
from trimtab_pipelines.documents import load_endpoints, load_pipeline, write_json
from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_pipelines.processes.parent_death import command_tied_to_parent
from trimtab_pipelines.replica_groups import memory_bytes
from trimtab_pipelines.spec import InferencePipeline
from trimtab_profiler.memory import PEAK, read_bytes

pytestmark = pytest.mark.security

CHAT = "/v1/chat/completions"
JSON = "Content-Type: application/json"
GIGABYTE = 10**9
TIMES = 3
MAX_MEMORY_MEBIBYTES, MAX_CPU_SECONDS = 64, 0.05
PATIENCE_SECONDS = 60.0
PHASE_SECONDS, WARM_LINES = 20.0, 400
ATTACKERS, HOSTILE_RPS = 4, 10.0
MAX_STOP_SECONDS = 0.2


class ImageStore(BaseHTTPRequestHandler):
    """A server of images that misdirects: its redirect leads to a secret."""

    reached: list[str]
    """Paths that no router may fetch."""

    def do_GET(self) -> None:
        match self.path:
            case "/images/away":
                self.send_response(302)
                self.send_header("Location", "/secret")
                self.end_headers()
            case "/images/page":
                self._send("text/html", b"<html></html>" * 100)
            case "/images/endless":
                with suppress(ConnectionError):
                    self._send("image/png", b"")
                    while True:
                        self.wfile.write(bytes(2**16))
            case _:
                self.reached.append(self.path)
                self._send("text/plain", b"secret")

    def _send(self, kind: str, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def store() -> Iterator[tuple[str, list[str]]]:
    """URL of the image store, and the paths that were fetched although they may not be."""
    reached: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Store", (ImageStore,), {"reached": reached})) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_address[1]}/images/", reached
        serving.shutdown()


@pytest.fixture(scope="module", params=[(), ("--no-proxy",)], ids=["envoy", "no-proxy"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, store: tuple[str, list[str]]
) -> Iterator[Server]:
    """A small model whose router may fetch images from the store and from `localhost`."""
    folder, spec = (
        tmp_path_factory.mktemp("chats"),
        chat_pipeline().spec.model_dump(by_alias=True, mode="json", exclude_none=True),
    )
    spec["chat"] = {"images": {"trustedPrefixes": [store[0]], "allowedDomains": ["localhost"]}}
    pipeline = InferencePipeline.model_validate({"metadata": {"name": "tiny"}, "spec": spec})
    write_json(folder / "pipeline.yaml", pipeline)
    write_json(folder / "plan.json", chat_plan(pipeline))
    arguments = ("--plan", str(folder / "plan.json"), *request.param)
    with up(folder, *arguments, pipeline=folder / "pipeline.yaml") as local:
        yield Server(local)


@pytest.fixture
def router(server: Server, store: tuple[str, list[str]]) -> Iterator[int]:
    """Process of the router, which must survive the test and fetch nothing that it may not."""
    processes = server.processes()
    yield processes["router"]
    assert server.processes() == processes
    assert store[1] == []


async def respond(port: int, pieces: Iterable[bytes]) -> tuple[str, str | None]:
    """Send pieces while reading; returns the status and OpenAI's code of an error."""

    async def read(reader: Any) -> bytes:
        response = b""
        while not response.endswith((b"}", b"]")) and (piece := await reader.read(2**16)):
            response += piece
        return response

    response = await raw_http.exchange(port, pieces, read, PATIENCE_SECONDS)
    assert response, "no response"
    body = json.loads(response.partition(b"\r\n\r\n")[2])
    return raw_http.status_of(response), body.get("error", {}).get("code")


async def attack(
    server: Server, router: int, figures: Figures, pieces: Callable[[], Iterable[bytes]]
) -> set[tuple[str, str | None]]:
    """Send a chat some times and judge its cost; returns the responses."""
    responses, seconds, growth = set(), [], []
    for _ in range(TIMES):
        forget_peak_memory([router])
        before, began = psutil.Process(router).memory_info().rss, cpu_seconds(router)
        responses.add(await respond(server.local.rest_port, pieces()))
        seconds.append(cpu_seconds(router) - began)
        growth.append((read_bytes(router, PEAK) - before) / MEBIBYTE)
    figures.require("additional memory, MiB", round(max(growth), 1), "<=", MAX_MEMORY_MEBIBYTES)
    figures.require("processor time, seconds", round(min(seconds), 4), "<=", MAX_CPU_SECONDS, depends_on_load=True)
    return responses


@pytest.mark.parametrize("kind", [*READ, *FETCHED, *SHOWN], ids=lambda kind: kind.name)
async def test_hostile_chat_is_cheap(
    server: Server, router: int, store: tuple[str, list[str]], figures: Figures, kind: Attack
) -> None:
    body = kind.body(Ground("tiny", store[0]))

    responses = await attack(server, router, figures, lambda: [raw_http.post(CHAT, body, JSON)])

    assert responses == {(str(kind.status), kind.code)}


@pytest.mark.parametrize("is_chunked", [False, True], ids=["announced", "chunked"])
async def test_gigabyte_is_rejected(server: Server, router: int, figures: Figures, *, is_chunked: bool) -> None:
    length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {GIGABYTE}"
    piece = b"%x\r\n%s\r\n" % (MEBIBYTE, bytes(MEBIBYTE)) if is_chunked else bytes(MEBIBYTE)

    def pieces() -> Iterator[bytes]:
        yield raw_http.head("POST", CHAT, JSON, length)
        yield from [piece] * (GIGABYTE // MEBIBYTE)

    assert await attack(server, router, figures, pieces) == {("413", "request_too_large")}


@contextmanager
def friendly_chats(server: Server, replica: psutil.Process) -> Iterator[None]:
    """Twenty chats with an image a second from another process, and as many checks of the replica's health."""
    endpoints = load_endpoints(server.local.folder / "endpoints.json")
    port = int(endpoints.stages["text"][0].address.rpartition(":")[2])
    server.friendly_log = server.local.folder / "friendly.jsonl"
    options = {"rest-port": server.local.rest_port, "grpc-port": server.local.grpc_port or 1, "model": "tiny"}
    options |= {"admin-port": server.local.admin_port, "router": server.processes()["router"]}
    options |= {"replica-port": port, "replica": replica.pid, "log": server.friendly_log}
    words = [f"--{name}={value}" for name, value in options.items()]
    friendly = subprocess.Popen(command_tied_to_parent("tests.security.friendly", *words))
    try:
        os.setpriority(os.PRIO_PROCESS, 0, HOSTILE_NICENESS)
        until(lambda: len(server.friendly_lines()) > WARM_LINES, "friendly chats are served")
        yield
    finally:
        friendly.terminate()
        friendly.wait()


def memory_limits(server: Server) -> dict[str, int]:
    """Memory limits of the containers in a cluster, by process."""
    pipeline = load_pipeline(server.local.folder.parent / "pipeline.yaml")
    limits = {"router": pipeline.spec.router.resources.memory, "envoy": EdgeSettings().memory}
    limits["replica"] = memory_bytes(pipeline.spec.stages[0].variants)
    return {name: limit for name, limit in limits.items() if name in {*server.processes(), "replica"}}


async def send_in_turn(server: Server, requests: Sequence[bytes]) -> Counter[str]:
    """Send all requests again and again from some clients, ten a second; returns how many got which status."""
    sent: Counter[str] = Counter()

    async def send(first: int) -> None:
        for number in itertools.count(first, ATTACKERS):
            due = asyncio.get_running_loop().time() + ATTACKERS / HOSTILE_RPS
            status, _ = await respond(server.local.rest_port, [requests[number % len(requests)]])
            sent[status] += 1
            await asyncio.sleep(due - asyncio.get_running_loop().time())

    with suppress(TimeoutError):
        async with asyncio.timeout(PHASE_SECONDS):
            await asyncio.gather(*map(send, range(ATTACKERS)))
    return sent


async def test_friendly_chats_are_served_beside_hostile_ones(server: Server, store: Any, figures: Figures) -> None:
    """Alone and beside every attack in turn."""
    replica = server.local.model_server("text")
    processes = server.processes() | {"replica": replica.pid}
    requests = [raw_http.post(CHAT, kind.body(Ground("tiny", store[0])), JSON) for kind in (*READ, *SHOWN, *BURDENING)]
    sent: Counter[str] = Counter()
    bounds: list[float] = []
    with friendly_chats(server, replica):
        forget_peak_memory(processes.values())
        for _ in range(TIMES):
            bounds.append(time.monotonic())
            await asyncio.sleep(PHASE_SECONDS)
            bounds.append(time.monotonic())
            sent += await send_in_turn(server, requests)
        bounds.append(time.monotonic())

    lines = [line for line in server.friendly_lines(bounds[0]) if line.at < bounds[-1]]
    chats = [line for line in lines if line.kind == "chat"]
    p99s = [
        float(np.percentile([chat.seconds for chat in chats if begin <= chat.at < end], 99))
        for begin, end in itertools.pairwise(bounds)
    ]
    stops = [min(line.seconds, line.busy_seconds) for line in lines if line.kind == "replica"]
    figures.add(p99_seconds_calm_hostile_in_turn=" ".join(f"{p99:.3f}" for p99 in p99s))
    figures.add(friendly_chats=len(chats), **{f"hostile_{status}": count for status, count in sent.items()})
    for name, limit in memory_limits(server).items():
        peak = read_bytes(processes[name], PEAK) / MEBIBYTE
        figures.require(f"peak memory of the {name}, MiB", round(peak, 1), "<=", limit / MEBIBYTE)
    failed = Counter(c.code for c in chats if c.code != "ok")
    figures.require("failed friendly chats", failed.total(), "<=", 0)
    figures.require("longest stop of the replica's loop, seconds", round(max(stops), 3), "<=", MAX_STOP_SECONDS)
    assert server.processes() | {"replica": server.local.model_server("text").pid} == processes
    ratio = median(hostile / calm for calm, hostile in zip(p99s[::2], p99s[1::2], strict=True))
    figures.require("p99 relative to calm, median of turns", round(ratio, 2), "<=", 2.0, depends_on_load=True)


def test_placeholders_in_text_are_no_images(server: Server) -> None:
    def image_tokens(text: str) -> int:
        url = f"http://127.0.0.1:{server.local.rest_port}{CHAT}"
        status, answer = post(url, json.loads(chat(Ground("tiny"), text, [a_small_png()])), PATIENCE_SECONDS)
        assert status == 200, answer
        return int(answer["usage"]["prompt_tokens_details"]["image_tokens"])

    assert image_tokens(SPELLED) == image_tokens("see")
