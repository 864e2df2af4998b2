"""Hostile chats to a served model, with Envoy and without: response, and the router's memory and processor time.

tests/router/test_chats.py sends them to a router in the process of the test.
"""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.figures import Figures
from tests.local_run import chat_pipeline, chat_plan, post, up
from tests.security import raw_http
from tests.security.attacks import FETCHED, READ, SHOWN, SPELLED, Attack, Ground, a_small_png, chat
from tests.security.conftest import MEBIBYTE, Server, forget_peak_memory, peak_memory_bytes
from trimtab_pipelines.documents import write_json
from trimtab_pipelines.spec import InferencePipeline

pytestmark = pytest.mark.security

CHAT = "/v1/chat/completions"
JSON = "Content-Type: application/json"
GIGABYTE = 10**9
TIMES = 3
MAX_MEMORY_MEBIBYTES, MAX_CPU_SECONDS = 64, 0.05
PATIENCE_SECONDS = 60.0


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


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


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
        growth.append((peak_memory_bytes(router) - before) / MEBIBYTE)
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


def test_placeholders_in_text_are_no_images(server: Server) -> None:
    def image_tokens(text: str) -> int:
        url = f"http://127.0.0.1:{server.local.rest_port}{CHAT}"
        status, answer = post(url, json.loads(chat(Ground("tiny"), text, [a_small_png()])), PATIENCE_SECONDS)
        assert status == 200, answer
        return int(answer["usage"]["prompt_tokens_details"]["image_tokens"])

    assert image_tokens(SPELLED) == image_tokens("see")
