"""The stranger's machine: a pipeline of two stages on disk, the command line, and what runs below it."""

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

import psutil
import yaml

from benchmarks.first_week.checking import require
from benchmarks.router.processes import echo_pipeline
from trimtab_pipelines.errors import OperationFailed
from trimtab_pipelines.processes.parent_death import command_tied_to_parent

NUMBERS, SLO_SECONDS = 4, 2.0
PATIENCE_SECONDS = 120.0
_READY = re.compile(r"http://127\.0\.0\.1:(\d+)/v2\S+ gRPC 127\.0\.0\.1:(\d+), metrics http://127\.0\.0\.1:(\d+)/")


_PAGE = re.compile(r"^live page: (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended."""

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
    admin_port: int
    page: str
    """Where its live page is."""

    def ask(self, timeout_seconds: float = 10.0, **more: Any) -> tuple[int, dict[str, Any]]:
        """Send one request; returns HTTP status and body."""
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, NUMBERS], "data": [1.0] * NUMBERS}
        body = {"inputs": [tensor], "parameters": {"timeout": int(timeout_seconds * 1e6)}, **more}
        return post(f"http://127.0.0.1:{self.rest_port}/v2/models/echo/infer", body, timeout_seconds + 5.0)

    def counters(self) -> dict[str, float]:
        """The router's requests by outcome, and `received`."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        found = dict(re.findall(r'^trimtab_requests_total\{.*outcome="(\w+)".*\} (\S+)$', text, re.MULTILINE))
        received = re.findall(r"^trimtab_requests_received_total\{.*\} (\S+)$", text, re.MULTILINE)
        return {name: float(count) for name, count in found.items()} | {"received": float(received[0])}

    def running(self, words: str) -> list[psutil.Process]:
        """The processes below it whose command line has these words."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in below if words in _words_of(process)]

    def model_server(self, stage: str) -> psutil.Process:
        """The model server of a stage, of which there is one; its log says which process it is."""
        log = max((self.folder / "logs").glob(f"{stage}-*.log"), key=lambda path: path.stat().st_mtime)
        for process in psutil.Process(self.process.pid).children(recursive=True):
            if _writes(process, log):
                return process
        raise LookupError(f"no process writes {log}")

    def told(self) -> str:
        """What the local runtime wrote into its log."""
        return (self.folder / "logs" / "supervisor.log").read_text()

    def stop(self, number: signal.Signals = signal.SIGINT) -> Done:
        """End it; returns how it ended."""
        self.process.send_signal(number)
        output, errors = self.process.communicate(timeout=PATIENCE_SECONDS)
        return Done(self.process.returncode, output, errors)


def post(url: str, body: object, timeout_seconds: float = 10.0) -> tuple[int, dict[str, Any]]:
    """Send JSON; returns status and body, whatever the status."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=timeout_seconds) as answer:  # noqa: S310
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def a_pipeline(folder: Path, **changes: Any) -> Path:
    """Write the pipeline; `changes` replace fields of its spec. Returns its file."""
    folder.mkdir(parents=True, exist_ok=True)
    document = echo_pipeline(NUMBERS, 0.0, SLO_SECONDS).model_dump(mode="json", by_alias=True, exclude_none=True)
    document["spec"] |= changes
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def trimtab(*arguments: str, timeout_seconds: float = PATIENCE_SECONDS) -> Done:
    """Run a command to its end."""
    command = command_tied_to_parent("trimtab", *arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


@contextmanager
def up(folder: Path, *arguments: str, run_folder: Path | None = None, pipeline: Path | None = None) -> Iterator[Up]:
    """Run `trimtab up` until the block ends; without a pipeline, with the stranger's own."""
    pipeline, kept = pipeline or a_pipeline(folder), run_folder or folder / "run"
    command = command_tied_to_parent("trimtab", "up", str(pipeline), "--folder", str(kept))
    command += ["--rest-port", "0", "--grpc-port", "0", "--admin-port", "0", "--page-port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield Up(process, kept, *_ports(process))
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
    """Wait until it holds; returns the seconds it took. Raises BrokenPromiseError where it does not in time."""
    began = time.monotonic()
    while not holds():
        require(time.monotonic() - began < patience_seconds, f"waited {patience_seconds:g} s in vain until {what}")
        time.sleep(0.02)
    return time.monotonic() - began


def _ports(process: "subprocess.Popen[str]") -> tuple[int, int, int, str]:
    """Read the lines that say where it serves, and where its page is; raises Failed where it ends without them."""
    if process.stdout is None:
        raise RuntimeError("the command has no output to read")
    seen = ""
    while line := process.stdout.readline():
        seen += line
        match, page = _READY.search(seen), _PAGE.search(seen)
        if match and page:
            return int(match[1]), int(match[2]), int(match[3]), page[1]
    errors = process.stderr.read() if process.stderr else ""
    raise OperationFailed(f"trimtab up did not serve: {seen}{errors}".strip())


def _words_of(process: psutil.Process) -> str:
    """Its command line; empty for one that has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _writes(process: psutil.Process, log: Path) -> bool:
    try:
        return Path(f"/proc/{process.pid}/fd/1").readlink() == log.resolve()
    except OSError:
        return False
