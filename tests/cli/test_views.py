"""Views of a run while it runs: the live page, the terminal, and the recorder of remote routers."""

import asyncio
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import cast

import aiohttp
import pytest
from rich.console import Console

from tests.cli.pipelines import write_echo_pipeline
from tests.cli.runs import a_run, a_sample, plans
from tests.local_run import charts_of, recorded_seconds
from trimtab import remote_recorder, run_record
from trimtab.local.counters import Counters
from trimtab.local.router_client import RouterClient, RouterUnreachable
from trimtab.local.supervisor import Fault, Setup, Supervisor
from trimtab.remote_recorder import RemoteRecorder, Routers, sum_counters
from trimtab.report import live_page
from trimtab.report.live_page import LivePage, PageError
from trimtab.report.summary import summary_items
from trimtab.run import LocalRun
from trimtab.run_record import Recorder
from trimtab.run_samples import Run
from trimtab.terminal_view import terminal_view
from trimtab_loadtester.attack import Progress
from trimtab_pipelines.processes.child_process import StartError
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.router_state import EndpointState, RouterState, StageState

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def start_recorder(folder: Path) -> run_record.Recorder:
    recorder = run_record.Recorder(folder, "sample", a_run().pipeline)
    recorder.start(None)
    run_record.write_decisions(folder, plans())
    return recorder


def extend(recorder: run_record.Recorder, seconds: range) -> None:
    for second in seconds:
        recorder.add(a_sample(second), [Fault(a_sample(5).at, "replica first-0 ended")] if second > 5 else [], 1.0)


async def get(page: LivePage, **headers: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(page.url, headers=headers) as response:
        return response.status, await response.text()


async def test_page_shows_what_is_recorded_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "MIN_RENDER_SECONDS", 0.0)
    recorder, page = start_recorder(tmp_path), LivePage(tmp_path, 0)
    await page.start()
    try:
        _, empty = await get(page)
        extend(recorder, range(3))
        _, gaps = await get(page)
        extend(recorder, range(3, 20))
        _, first = await get(page)
        extend(recorder, range(20, 60))
        _, second = await get(page)
        status, _ = await get(page, Host="evil.example")
    finally:
        await page.stop()
    assert "No sample is recorded yet" in empty
    assert charts_of(gaps), "gaps in curves are not NaN"
    assert [recorded_seconds(html) for html in (first, second)] == [19, 59]
    assert "data-state='live'" in second
    for text in ("Latest plan, 3", "to slow &lt;because&gt;", "replica first-0 ended", "Stage first", "declared"):
        assert text in second
    assert status == 403


async def test_open_page_gets_the_finished_run(tmp_path: Path) -> None:
    extend(start_recorder(tmp_path), range(20))
    page = LivePage(tmp_path, 0)
    await page.start()
    await get(page)
    finishing = asyncio.create_task(page.finish(a_run()))
    await asyncio.sleep(0)
    _, html = await get(page)
    await finishing
    with pytest.raises(aiohttp.ClientConnectorError):
        await get(page)
    assert "data-state='finished'" in html
    assert "1128 ok" in html


async def test_taken_port_is_an_error(tmp_path: Path) -> None:
    first = LivePage(tmp_path, 0)
    await first.start()
    try:
        with pytest.raises(PageError, match=f"port {first.port} is taken .*--page-port"):
            await LivePage(tmp_path, first.port).start()
    finally:
        await first.stop()


def test_long_run_is_thinned(tmp_path: Path) -> None:
    extend(start_recorder(tmp_path), range(1000))
    run_record.write_decisions(tmp_path, plans() * 200)
    found: Run = run_record.load(tmp_path, 100, 20)
    assert len(found.plans) <= 20
    at = [round(sample.at - found.samples[0].at) for sample in found.samples]
    assert at[0] == 0
    assert at[-50:] == list(range(950, 1000))
    assert len(at) <= 100


@pytest.mark.skipif(BROWSER is None, reason="no browser here")
async def test_browser_refreshes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header is of a later sample than the charts that the page was opened with."""
    monkeypatch.setattr(live_page, "MIN_RENDER_SECONDS", 0.0)
    recorder, page = start_recorder(tmp_path), LivePage(tmp_path, 0)
    extend(recorder, range(20))

    async def keep_recording() -> None:
        for second in range(20, 10_000):
            extend(recorder, range(second, second + 1))
            await asyncio.sleep(0.02)

    recording = asyncio.create_task(keep_recording())
    await page.start()
    try:
        html = await dump_dom(page.url, tmp_path / "profile")
    finally:
        recording.cancel()
        await page.stop()
    header = re.search(r"(\d+) s from", html)
    assert header is not None
    assert 19 <= recorded_seconds(html) < int(header[1])
    assert 'data-state="live"' in html
    for text in ("Stage first", "Latest plan, 3", "Requests not answered in time"):
        assert text in html
    assert html.count("main-svg") >= 2 * 6  # plotly has drawn each chart
    assert html.count("js-plotly-plot") >= 6


async def dump_dom(url: str, profile: Path) -> str:
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--no-first-run"]
    command = [BROWSER, *options, "--virtual-time-budget=6000", "--dump-dom", url]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    output, _ = await asyncio.wait_for(process.communicate(), 120)
    return output.decode()


def test_counters_of_routers_are_summed() -> None:
    one, other = a_sample(10).counters, a_sample(30).counters
    both = sum_counters([one, other])
    assert (both.received, both.outcomes["ok"], both.accuracy_count) == (400, 400, 400)
    assert both.latency_buckets[2.0] == 400
    assert sum_counters([one]) == one


def test_requests_in_flight_do_not_fail_the_accounting(tmp_path: Path) -> None:
    extend(start_recorder(tmp_path), range(20))
    run = run_record.load(tmp_path)
    last = run.samples[-1]
    busy = replace(last, counters=replace(last.counters, received=last.counters.received + 3))
    (item, *_) = summary_items(replace(run, samples=[*run.samples, busy]))
    assert "+ 3 in flight" in item.detail
    assert item.holds is None
    assert summary_items(run)[0].holds is True


@pytest.fixture
def local_run(tmp_path: Path) -> LocalRun:
    """A run half-way, without processes."""
    setup = Setup(write_echo_pipeline(tmp_path), tmp_path / "run")
    local_run = LocalRun("sample", setup)
    local_run.supervisor = Supervisor(setup)
    local_run.supervisor.plan = plans()[1]
    local_run.recorder = Recorder(setup.folder, "sample", local_run.supervisor.pipeline)
    local_run.progress = Progress(60.0, 120.0, 1200, 600, dict.fromkeys(RequestOutcome, 100))
    return local_run


def shown(local_run: LocalRun, *, terminal: bool) -> str:
    output = StringIO()
    console = Console(file=output, force_terminal=terminal, width=150, soft_wrap=True, highlight=False)
    with terminal_view(local_run, console):
        for sample in a_run().samples[:61]:
            local_run.record_sample(sample)
    return output.getvalue()


def test_log_gets_plain_lines(local_run: LocalRun) -> None:
    """One line in ten seconds with load, plan, latency and stages; a fault gets its own line, once."""
    local_run.supervisor.faults.append(Fault(a_run().samples[30].at - 0.5, "replica first-0 ended"))
    lines = shown(local_run, terminal=False).splitlines()
    assert lines.count("! replica first-0 ended") == 1
    assert len(lines) == 8
    assert lines[-1] == (
        "load 10.0 requests/s · planned for 12.0 (lstm) · p50 ≤ 500 ms, p99 ≤ 2000 ms, SLO 2000 ms · cores 1.5/2"
        " · 60/120 s · first: slow ×1 batch 8, second: slow ×1 batch 8"
    )


def test_terminal_gets_a_table(local_run: LocalRun) -> None:
    text = shown(local_run, terminal=True)
    assert "\x1b[" in text
    assert "fast → slow" in text
    assert "expected accuracy 0.8800" in text
    assert "plan 2: to slow <because>" in text


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
        endpoints = {"first-1": EndpointState(rejection="ejected as an outlier: slow")} if self.received == 7 else {}
        return RouterState(ready=True, plan_generation=1, stages={"first": StageState(endpoints=endpoints)})

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
    faults = [(fault.what, fault.detail) for fault in run_record.load(tmp_path).faults]
    assert faults == [("replica first-1 is not used", "ejected as an outlier: slow")]


async def test_silent_kubectl_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_recorder, "FORWARD_SECONDS", 0.05)
    silent = (sys.executable, "-S", "-c", "import time; time.sleep(60)")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*silent, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(5):
        with pytest.raises(StartError, match="kubectl cannot reach router-0: no output"):
            await remote_recorder.read_forwarded_port(process, "router-0")
        await process.wait()
