"""Shell: one run from start to end: supervisor, load, a sample every second, and the record of it all."""

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from trimtab.exit_codes import exit_code
from trimtab.local.load_process import LoadOptions, LoadProcess
from trimtab.local.router_client import RouterUnreachable
from trimtab.local.supervisor import Setup, Supervisor
from trimtab.report.live_page import LivePage, PageError
from trimtab.run_record import Recorder
from trimtab.run_samples import Run, Sample, StageSample
from trimtab_loadtester.attack import Progress
from trimtab_loadtester.results import Results

SAMPLE_SECONDS = 1.0
FaultInjector = Callable[[Supervisor], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class LocalRun:
    """A run under way, for whoever watches.

    Attributes:
        title: what the run is called.
        setup: what runs.
        load: what is sent; None leaves that to others.
        duration_seconds: when to stop without a load; None means when told to.
        on_ready: called once the first plan is true.
        on_sample: called after each sample.
        disturb: run beside the load, to break things.
        page_port: where the page of the run is served while it goes on, 0 for a free port; None serves none.
        sampled: how many samples were taken; the newest two are in `recent`, all of them in the run's folder.
        end_signal: SIGINT or SIGTERM, where it came before the run's end; the first that came.
    """

    title: str
    setup: Setup
    load: LoadOptions | None = None
    duration_seconds: float | None = None
    on_ready: Callable[["LocalRun"], None] = lambda _: None
    on_sample: Callable[["LocalRun"], None] = lambda _: None
    fault_injector: FaultInjector | None = None
    page_port: int | None = None
    page: LivePage | None = field(init=False, default=None)
    page_error: str = ""
    supervisor: Supervisor = field(init=False)
    recorder: Recorder = field(init=False)
    recent_samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=2))
    sample_count: int = 0
    progress: Progress | None = None
    end_signal: signal.Signals | None = None
    ready_seconds: float = 0.0
    _cpu_seconds: dict[int, float] = field(default_factory=dict)

    @property
    def interruption_code(self) -> int | None:
        """The exit code of a run that a signal ended early; None where none did."""
        return None if self.end_signal is None else exit_code(self.end_signal)

    async def run(self) -> Run:
        """Start, serve, stop, and return the record; SIGINT and SIGTERM end it early, and cleanly.

        The record is written into the run's folder as it comes.

        Raises:
            StartError: something did not come up.
            DocumentError: the pipeline or the plan cannot be used.
        """
        self.supervisor = Supervisor(self.setup)
        self.recorder = Recorder(self.setup.folder, self.title, self.supervisor.pipeline)
        await self._open_page()
        try:
            run = await self._recorded()
        except BaseException:
            if self.page is not None:
                await self.page.stop()
            raise
        if self.page is not None:
            await self.page.finish(run)
        return run

    async def _open_page(self) -> None:
        """Serve the page; without a port for it the run goes on, and says so."""
        if self.page_port is None:
            return
        page = LivePage(self.setup.folder, self.page_port)
        try:
            await page.start()
        except PageError as error:
            self.page_error = str(error)
        else:
            self.page = page

    async def _recorded(self) -> Run:
        """Serve until the end, and return the record."""
        started = time.monotonic()
        came: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()
        with _signals(came):
            serving = asyncio.create_task(self._serve(started))
            ends: set[asyncio.Future[Any]] = {serving, came}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                self.end_signal = came.result()
                serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving
        results = serving.result() if self.end_signal is None else None
        faults = tuple(self.supervisor.faults)
        self.recorder.write_facts(faults, self.ready_seconds)
        samples, plans = self.recorder.samples(), self.recorder.plans()
        return Run(self.title, self.supervisor.pipeline, samples, plans, results, faults, self.ready_seconds)

    async def _serve(self, started: float) -> Results | None:
        self.recorder.start(self.setup.plan if self.setup.profiles_file is None else None)
        async with self.supervisor as local:
            await local.ready()
            self.ready_seconds = time.monotonic() - started
            self.on_ready(self)
            sampling = asyncio.create_task(self._sample_always())
            disturbing = asyncio.create_task(self.fault_injector(local)) if self.fault_injector else None
            try:
                return await self._send()
            finally:
                for task in filter(None, (disturbing, sampling)):
                    task.cancel()
                await asyncio.gather(*filter(None, (disturbing, sampling)), return_exceptions=True)
                local.raise_failure()

    async def _send(self) -> Results | None:
        if self.load is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), self.duration_seconds)
            return None
        port = self.supervisor.grpc_port if self.load.wire == "gRPC" else self.supervisor.rest_port
        folder = self.setup.folder / "load"
        sending = await LoadProcess.start(self.setup.pipeline_file, f"127.0.0.1:{port}", self.load, folder)
        try:
            async for progress in sending.progress():
                self.progress = progress
            return await sending.results()
        finally:
            await sending.stop()

    async def _sample_always(self) -> None:
        due = time.monotonic()
        while True:
            with suppress(RouterUnreachable):
                self.record_sample(await self._sample())
            due = max(due + SAMPLE_SECONDS, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    def record_sample(self, sample: Sample) -> None:
        """Record a sample, and show it."""
        self.recent_samples.append(sample)
        self.sample_count += 1
        refused = self.recorder.disk_error
        self.recorder.add(sample, self.supervisor.faults, self.ready_seconds)
        if self.recorder.disk_error != refused:
            what = f"the disk takes no record: {self.recorder.disk_error}; it waits in memory"
            self.supervisor.record_fault(
                what if self.recorder.disk_error else "the disk takes the record again; nothing is missing"
            )
        self.on_sample(self)

    async def _sample(self) -> Sample:
        local = self.supervisor
        state, counters = await local.client.state(), await local.client.counters()
        stages = {
            name: StageSample(stage.variant, stage.batch_size, stage.ready_replicas, stage.queue_rows)
            for name, stage in state.stages.items()
        }
        now = time.time()
        seconds = now - self.recent_samples[-1].at if self.recent_samples else SAMPLE_SECONDS
        busy = self._cores_busy(local.replica_manager.pids, seconds)
        scored = (self.progress.correct, self.progress.total) if self.progress else (0, 0)
        return Sample(now, stages, local.replica_manager.cores, busy, counters, *scored)

    def _cores_busy(self, pids: Mapping[str, int], seconds: float) -> float:
        """Cores the replicas used since the last time; a new process counts from its second sample on."""
        used = {}
        for pid in pids.values():
            with suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                used[pid] = times.user + times.system
        busy = sum(after - self._cpu_seconds.get(pid, after) for pid, after in used.items())
        self._cpu_seconds = used
        return busy / seconds


class _signals:  # noqa: N801  (reads as the statement it is)
    """The first SIGINT or SIGTERM while the block runs is the future's result."""

    def __init__(self, came: "asyncio.Future[signal.Signals]") -> None:
        self._came = came
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.getsignal(number)
            asyncio.get_running_loop().add_signal_handler(number, self._hear, number)

    def _hear(self, number: signal.Signals) -> None:
        if not self._came.done():
            self._came.set_result(number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, handler)
