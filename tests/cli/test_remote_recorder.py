"""The record of routers elsewhere goes on when they, or the ways to them, are replaced."""

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
from trimtab.local.router_client import Counters, RouterClient, RouterUnreachable
from trimtab.remote_recorder import RemoteRecorder, Routers
from trimtab_pipelines.processes.child_process import StartError
from trimtab_pipelines.router_state import RouterState


class Told:
    """A router that answers so often, then never again."""

    def __init__(self, received: int, answers: int) -> None:
        self.received, self.answers, self.asked = received, answers, 0
        self.asked_thrice = asyncio.Event()

    async def state(self) -> RouterState:
        self.answers, self.asked = self.answers - 1, self.asked + 1
        if self.asked == 3:
            self.asked_thrice.set()
        if self.answers < 0:
            raise RouterUnreachable("gone")
        return RouterState(ready=True, plan_generation=1, stages={})

    async def counters(self) -> Counters:
        return replace(a_sample(1).counters, received=self.received)


async def test_routers_that_are_replaced_are_reached_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two goes, then the cluster does not answer, then there is another: each was recorded, nothing ended."""
    monkeypatch.setattr(remote_recorder, "SAMPLE_SECONDS", 0.001)
    recorder = run_record.Recorder(tmp_path, "elsewhere", a_run().pipeline)
    recorder.start(None)
    last = Told(3, 10**6)
    found = iter(([Told(5, 9), Told(7, 1)], StartError("no answer"), [last]))

    @asynccontextmanager
    async def reach() -> AsyncIterator[Routers]:
        routers = next(found)
        if isinstance(routers, StartError):
            raise routers
        yield a_run().pipeline, cast("list[RouterClient]", routers), None

    recording = asyncio.create_task(RemoteRecorder(recorder).run(reach))
    await asyncio.wait_for(last.asked_thrice.wait(), 10)
    assert not recording.done()
    recording.cancel()
    assert [sample.counters.received for sample in recorder.samples()[:4]] == [12, 5, 3, 3]


async def test_a_kubectl_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_recorder, "FORWARD_SECONDS", 0.05)
    silent = (sys.executable, "-S", "-c", "import time; time.sleep(60)")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*silent, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(5):
        with pytest.raises(StartError, match="kubectl cannot reach router-0: it says nothing"):
            await remote_recorder.read_forwarded_port(process, "router-0")
        await process.wait()
