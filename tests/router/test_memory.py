"""The largest request of each encoding: served or refused within the pod's memory, without blocking the event loop."""

import contextlib
import gzip
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.builders import a_plan
from tests.router.fakes import a_pipeline
from trimtab_pipelines.documents import dump_yaml, write_json
from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_pipelines.endpoints import Endpoint, Endpoints
from trimtab_pipelines.spec import RouterSettings
from trimtab_protocol import InferRequest, Tensor, rest
from trimtab_router.limits import MEBIBYTE, payload_bytes

REPOSITORY = Path(__file__).parents[2]
PATH = "/v2/models/sample/infer"
FILES = {"pipeline": "pipeline.yaml", "plan": "plan.json", "endpoints": "endpoints.json"}
POD_MEBIBYTES = RouterSettings().resources.memory // MEBIBYTE
LARGEST_BYTES = payload_bytes(a_pipeline(1), EdgeSettings())
SLO_SECONDS = 1.0
"""Of which the loop may be held up for a fifth."""
TRIES = 8
"""The machine may stall by itself now and then; what holds the loop up does it every time."""
WIDTH = LARGEST_BYTES // 4 - 1024


def binary(dtype: type = np.float32) -> tuple[bytes, dict[str, str]]:
    request = InferRequest("sample", (Tensor.of("x", np.ones((1, WIDTH), dtype)),))
    buffers, length = rest.encode_request(request)
    return b"".join(bytes(buffer) for buffer in buffers), {rest.HEADER_LENGTH: str(length)}


def with_json(data: str, datatype: str = "FP32") -> tuple[bytes, dict[str, str]]:
    numbers = data.count(",") + 1
    head = f'{{"inputs":[{{"name":"x","shape":[1,{numbers}],"datatype":"{datatype}","data":['
    return f"{head}{data}]}}]}}".encode(), {}


def strings() -> tuple[bytes, dict[str, str]]:
    count = 16 * 10**6 // 4
    parameters = {"binary_data_size": 4 * count}
    tensor = {"name": "x", "shape": [1, count], "datatype": "BYTES", "parameters": parameters}
    head = json.dumps({"inputs": [tensor]}).encode()
    return head + bytes(4 * count), {rest.HEADER_LENGTH: str(len(head))}


def packed(made: tuple[bytes, dict[str, str]]) -> tuple[bytes, dict[str, str]]:
    return gzip.compress(made[0], 1, mtime=0), made[1] | {"Content-Encoding": "gzip"}


def pieces(body: bytes) -> Iterator[bytes]:
    for begins in range(0, len(body), MEBIBYTE):
        yield body[begins : begins + MEBIBYTE]


LARGEST: dict[str, Callable[[], tuple[bytes, dict[str, str]]]] = {
    "binary": binary,
    "packed": lambda: packed(binary()),
    "JSON": lambda: with_json("0," * (MEBIBYTE // 2 - 100) + "0"),
    "JSON of fractions": lambda: with_json("0.5," * (MEBIBYTE // 4 - 100) + "0.5"),
    "JSON of objects": lambda: with_json("[]," * (MEBIBYTE // 3 - 100) + "[]"),
    "JSON beyond its bound": lambda: with_json("0," * (16 * MEBIBYTE) + "0"),
    "packed JSON beyond its bound": lambda: packed(with_json("0," * (16 * MEBIBYTE) + "0")),
    "strings": strings,
}


@contextmanager
def a_process(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], bytes]]:
    """A Python process, and the first line it writes."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=REPOSITORY
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline()
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


@contextmanager
def a_router(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    pipeline = a_pipeline(1, inputs=[{"name": "x", "datatype": "FP32", "shape": [-1]}])
    with a_process("tests.router.discarding_replica") as (_, port):
        endpoint = Endpoint(name="replica-0", address=f"127.0.0.1:{int(port)}", variants=("small",))
        (folder / "pipeline.yaml").write_text(dump_yaml(pipeline))
        write_json(folder / "plan.json", a_plan(pipeline))
        write_json(folder / "endpoints.json", Endpoints(stages={"stage-0": (endpoint,)}))
        files = (f"--{name}={folder / file}" for name, file in FILES.items())
        with a_process("trimtab_router", "--no-proxy", *files) as (process, ports):
            yield process, json.loads(ports)["rest_port"]


class Prober(threading.Thread):
    """Asks for the router's health again and again."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._longest = 0.0
        self._port = port
        self._over = threading.Event()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        while not self._over.wait(0.005):
            begun = time.monotonic()
            connection.request("GET", "/v2/health/live")
            connection.getresponse().read()
            self._longest = max(self._longest, time.monotonic() - begun)
        connection.close()

    def longest_since(self) -> float:
        """How long the slowest answer took since this was last asked."""
        longest, self._longest = self._longest, 0.0
        return longest

    def stop(self) -> None:
        self._over.set()
        self.join()


def post(port: int, body: bytes, headers: dict[str, str], *, chunked: bool) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", PATH, pieces(body) if chunked else body, headers, encode_chunked=chunked)
    try:
        return connection.getresponse().status
    finally:
        connection.close()


def peak_mebibytes(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def until_ready(port: int) -> None:
    while True:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            connection.request("GET", "/v2/health/ready")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.02)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("chunked", [False, True])
def test_the_largest_requests_stay_within_the_pods_memory(tmp_path, chunked):
    made = {name: make() for name, make in LARGEST.items()}
    with a_router(tmp_path) as (process, port):
        until_ready(port)
        prober = Prober(port)
        prober.start()
        statuses: dict[str, int] = {}
        held_up: dict[str, float] = {}
        for name, (body, headers) in made.items():
            framing = {"Transfer-Encoding": "chunked"} if chunked else {}
            for _ in range(TRIES):
                with contextlib.suppress(ConnectionError):  # what is refused is not read to its end
                    statuses[name] = post(port, body, headers | framing, chunked=chunked)
                held_up[name] = min(held_up.get(name, SLO_SECONDS), prober.longest_since())
                if held_up[name] < SLO_SECONDS / 10:
                    break
        prober.stop()
        peak = peak_mebibytes(process.pid)
        sys.stdout.write(f"peak {peak:.0f} MiB; statuses {statuses}; loop held up, in seconds: {held_up}\n")

        assert peak < POD_MEBIBYTES
        assert max(held_up.values()) < SLO_SECONDS / 5
        assert {statuses[name] for name in ("binary", "packed", "JSON")} == {200}
        assert {status for name, status in statuses.items() if "beyond" in name} <= {413}
        assert statuses["strings"] == 400
