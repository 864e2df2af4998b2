"""Drives the generator: finds a target's maximum, then offers multiples of it."""

import dataclasses
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.cores import CLIENT_CORE
from benchmarks.overload.board import Tally
from benchmarks.overload.generator import Order, Speech
from benchmarks.router.processes import ROOT
from trimtab_pipelines.processes.parent_death import command_tied_to_parent

FIRST_RPS, GROWTH, MOST_RPS = 200.0, 1.4, 20_000.0
STEP_SECONDS = 3.0
KEEPS_UP = 0.85
"""Of what is offered, in time: with less a step counts as beyond the maximum."""
STEPS_BEYOND = 2
AROUND = (0.85, 1.0, 1.2)
"""Of a maximum that was found a while ago: what is offered to see what it is now."""
SLO_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Case:
    """One way to knock."""

    name: str
    speech: Speech
    connections: int


SEVERAL, MANY_STREAMED, MANY_PLAIN = 8, 256, 1024
REST_SEVERAL = Case("rest, several connections (h2c)", "h2c", SEVERAL)
REST_MANY = Case("rest, many connections", "http1", MANY_PLAIN)
GRPC_SEVERAL = Case("grpc, several connections", "grpc", SEVERAL)
GRPC_MANY = Case("grpc, many connections", "grpc", MANY_STREAMED)
"""An HTTP/1.1 connection carries one request at a time, so several of them cannot carry a flood: REST comes over HTTP/2
there, and over more connections than may be under way otherwise."""


class Generator:
    """The generator's process, on a core of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def offer(self, case: Case, port: int, rate_rps: float, seconds: float) -> Tally:
        """Offer a rate and wait for what came of it."""
        order = Order(case.speech, port, case.connections, rate_rps, seconds, SLO_SECONDS)
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the generator has no pipes")
        self._process.stdin.write(json.dumps(dataclasses.asdict(order)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the generator ended with exit code {self._process.wait()}")
        return Tally(**json.loads(line))

    def maximum(self, case: Case, port: int) -> Tally:
        """Offer more and more; return the step with the most answers in time."""
        self.offer(case, port, FIRST_RPS, 1.0)  # whatever is done once only
        rate, beyond = FIRST_RPS, 0
        steps: list[Tally] = []
        while beyond < STEPS_BEYOND and rate <= MOST_RPS:
            steps.append(self.offer(case, port, rate, STEP_SECONDS))
            beyond += steps[-1].goodput_rps < KEEPS_UP * rate
            rate *= GROWTH
        return max(steps, key=lambda step: step.goodput_rps)

    def maximum_now(self, case: Case, port: int, about_rps: float) -> float:
        """Look again around a maximum found a while ago, since machines become faster and slower; answers a second."""
        return max(self.offer(case, port, share * about_rps, STEP_SECONDS).goodput_rps for share in AROUND)


@contextmanager
def generator() -> Iterator[Generator]:
    """Start the generator; end it."""
    command = command_tied_to_parent("benchmarks.overload.generator", str(CLIENT_CORE))
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with process:
        try:
            yield Generator(process)
        finally:
            process.kill()
