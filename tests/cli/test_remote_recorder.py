"""Recorder of remote routers: reconnects when routers or connections are replaced."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from tests.cli.runs import a_run, a_sample
from trimtab import remote_recorder, run_record
from trimtab.local.counters import Counters
from trimtab.local.router_client import RouterClient, RouterUnreachable
from trimtab.remote_recorder import RemoteRecorder, Routers
from trimtab_pipelines.processes.child_process import StartError
from trimtab_pipelines.router_state import RouterState


class FakeRouter:
    """A router that responds a number of times, then never."""

    def __init__(self, received: int, responses: int) -> None:
        self.received, self.responses, self.requests = received, responses, 0
        self.third_request = asyncio.Event()

    async def state(self) -> RouterState:
        self.responses, self.requests = self.responses - 1, self.requests + 1
        if self.requests == 3:
            self.third_request.set()
        if self.responses < 0:
            raise RouterUnreachable("gone")
        return RouterState(ready=True, plan_generation=1, stages={})

    async def counters(self) -> Counters:
        return replace(a_sample(1).counters, received=self.received)


async def test_recorder_reconnects_to_replaced_routers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two routers ends, then the cluster fails, then a new router starts; all are recorded."""
    monkeypatch.setattr(remote_recorder, "SAMPLE_SECONDS", 0.001)
    recorder = run_record.Recorder(tmp_path, "elsewhere", a_run().pipeline)
    recorder.start(None)
    last = FakeRouter(3, 10**6)
    found = iter(([FakeRouter(5, 9), FakeRouter(7, 1)], StartError("no answer"), [last]))

    @asynccontextmanager
    async def connect() -> AsyncIterator[Routers]:
        routers = next(found)
        if isinstance(routers, StartError):
            raise routers
        yield a_run().pipeline, cast("list[RouterClient]", routers), None

    recording = asyncio.create_task(RemoteRecorder(recorder).run(connect))
    await asyncio.wait_for(last.third_request.wait(), 10)
    assert not recording.done()
    recording.cancel()
    assert [sample.counters.received for sample in recorder.samples()[:4]] == [12, 5, 3, 3]


async def test_silent_kubectl_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_recorder, "FORWARD_SECONDS", 0.05)
    silent = (sys.executable, "-S", "-c", "import time; time.sleep(60)")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*silent, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(5):
        with pytest.raises(StartError, match="kubectl cannot reach router-0: no output"):
            await remote_recorder.read_forwarded_port(process, "router-0")
        await process.wait()
