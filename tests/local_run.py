"""`trimtab up` and other commands as child processes, their live page, and the pipelines that tests serve with them."""

import base64
import json
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.builders import a_plan, a_variant
from tests.cli.pipelines import write_echo_pipeline
from tests.router.chats import a_chat_pipeline, a_writer
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.processes.parent_death import command_tied_to_parent
from trimtab_pipelines.resource import Metadata
from trimtab_pipelines.spec import InferencePipeline

PATIENCE_SECONDS = 300.0
_READY = re.compile(
    r"http://127\.0\.0\.1:(\d+)/v2\S+ (?:gRPC 127\.0\.0\.1:(\d+)|no Envoy.*), metrics http://127\.0\.0\.1:(\d+)/"
)
_PAGE = re.compile(r"^live page: (\S+)$", re.MULTILINE)
_CHARTS = re.compile(r"<script type=['\"]application/json['\"] id=['\"]charts['\"]>(.*?)</script>", re.DOTALL)
"""In the page as served, or in a browser's DOM, which has double quotes."""


@dataclass(frozen=True, slots=True)
class Completed:
    """Result of a command."""

    code: int
    output: str
    errors: str


@dataclass(slots=True)
class Up:
    """A `trimtab up` that serves."""

    process: "subprocess.Popen[str]"
    folder: Path
    rest_port: int
    grpc_port: int
    """0 without Envoy."""
    admin_port: int
    page: str
    """URL of its live page."""

    def ask(self, timeout_seconds: float = 10.0, **more: Any) -> tuple[int, dict[str, Any]]:
        """Send one request to the echo pipeline; returns HTTP status and body."""
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0] * 4}
        body = {"inputs": [tensor], "parameters": {"timeout": int(timeout_seconds * 1e6)}, **more}
        return post(f"http://127.0.0.1:{self.rest_port}/v2/models/sample/infer", body, timeout_seconds + 5.0)

    @property
    def url(self) -> str:
        """Of its router."""
        return f"http://127.0.0.1:{self.rest_port}"

    def metrics(self) -> str:
        """The router's metrics, as Prometheus reads them."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/metrics", timeout=5) as response:
            text: str = response.read().decode()
        return text

    def counters(self) -> dict[str, float]:
        """The router's requests by outcome, and `received`."""
        text = self.metrics()
        counts = dict(re.findall(r'^trimtab_requests_total\{.*outcome="(\w+)".*\} (\S+)$', text, re.MULTILINE))
        received = re.findall(r"^trimtab_requests_received_total\{.*\} (\S+)$", text, re.MULTILINE)
        return {name: float(count) for name, count in counts.items()} | {"received": float(received[0])}

    def running(self, words: str) -> list[psutil.Process]:
        """The processes below it whose command line has these words."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in below if words in command_line(process)]

    def model_server(self, stage: str) -> psutil.Process:
        """The model server of a stage, of which there is one: the process that writes its log."""
        log = max((self.folder / "logs").glob(f"{stage}-*.log"), key=lambda path: path.stat().st_mtime)
        return self.replica(log.stem)

    def replica(self, name: str) -> psutil.Process:
        """The model server of a replica: the process that writes its log."""
        log = self.folder / "logs" / f"{name}.log"
        for process in psutil.Process(self.process.pid).children(recursive=True):
            if _writes(process, log):
                return process
        raise LookupError(f"no process writes {log}")

    def log(self) -> str:
        return (self.folder / "logs" / "supervisor.log").read_text()

    def stop(self, number: signal.Signals = signal.SIGINT) -> Completed:
        self.process.send_signal(number)
        output, errors = self.process.communicate(timeout=PATIENCE_SECONDS)
        return Completed(self.process.returncode, output, errors)


def post(url: str, body: object, timeout_seconds: float = 10.0) -> tuple[int, dict[str, Any]]:
    """Send JSON; returns status and body, whatever the status."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=timeout_seconds) as response:  # noqa: S310
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def trimtab(*arguments: str, timeout_seconds: float = PATIENCE_SECONDS) -> Completed:
    command = command_tied_to_parent("trimtab", *arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    return Completed(done.returncode, done.stdout, done.stderr)


@contextmanager
def up(folder: Path, *arguments: str, run_folder: Path | None = None, pipeline: Path | None = None) -> Iterator[Up]:
    """Run `trimtab up` until the block ends; without a pipeline, the echo pipeline."""
    pipeline, record = pipeline or write_echo_pipeline(folder), run_folder or folder / "run"
    command = command_tied_to_parent("trimtab", "up", str(pipeline), "--folder", str(record))
    command += ["--rest-port", "0", "--grpc-port", "0", "--admin-port", "0", "--page-port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield Up(process, record, *_ports(process))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def until(holds: Callable[[], object], what: str, patience_seconds: float = PATIENCE_SECONDS) -> float:
    """Wait until a condition holds; returns the seconds it took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < patience_seconds, f"waited {patience_seconds:g} s in vain until {what}"
        time.sleep(0.02)
    return time.monotonic() - began


def charts_of(html: str) -> dict[str, Any]:
    """Charts of a live page by the id of their element. Raises ValueError for a number that is not JSON."""
    match = _CHARTS.search(html)
    assert match is not None, "the page has no charts element"

    def reject(constant: str) -> None:
        raise ValueError(constant)

    charts: dict[str, Any] = json.loads(match[1], parse_constant=reject)
    return charts


def recorded_seconds(html: str) -> int:
    """Number of points of the load chart, one per second; 0 if nothing is recorded yet."""
    load = charts_of(html).get("chart-load")
    if load is None:
        return 0
    x = load["data"][0]["x"]
    return len(x) if isinstance(x, list) else len(np.frombuffer(base64.b64decode(x["bdata"]), x["dtype"]))


def chat_pipeline(
    *,
    slots: int = 8,
    slot_tokens: int = 800,
    weights: str = "random://?seed=1",
    family: str = "lmm-digits/colocated",
    **parameters: str,
) -> InferencePipeline:
    """One generation stage; without `weights`, a small model with random ones."""
    settings = {"slots": slots, "slot_tokens": slot_tokens, **parameters}
    variant = a_variant("tiny", family=family, storageUri=weights, maxBatchSize=slots, parameters=settings)
    stage = a_writer(batchSizes=[slots], variants=[variant])
    pipeline = a_chat_pipeline([stage], slo={"latency": "60s", "timeToFirstToken": "60s"}, budget={"cores": "2"})
    return pipeline.replace(metadata=Metadata(name="tiny"))


def chat_plan(pipeline: InferencePipeline) -> PipelinePlan:
    """The only variant of a chat pipeline in one replica."""
    return a_plan(pipeline, batchSize=pipeline.spec.stages[0].batch_sizes[0])


def command_line(process: psutil.Process) -> str:
    """The words of a process's command line; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _ports(process: "subprocess.Popen[str]") -> tuple[int, int, int, str]:
    """Read where it serves, and the URL of its page."""
    assert process.stdout is not None
    assert process.stderr is not None
    output = ""
    while line := process.stdout.readline():
        output += line
        ports, page = _READY.search(output), _PAGE.search(output)
        if ports and page:
            return int(ports[1]), int(ports[2] or 0), int(ports[3]), page[1]
    raise AssertionError(f"trimtab up did not serve: {output}{process.stderr.read()}")


def _writes(process: psutil.Process, log: Path) -> bool:
    try:
        return Path(f"/proc/{process.pid}/fd/1").readlink() == log.resolve()
    except OSError:
        return False
