"""Run on this machine from start to end: supervisor, load, a sample each second, and the record."""

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from trimtab.local.load_process import LoadOptions, LoadProcess
from trimtab.local.router_client import RouterUnreachable
from trimtab.local.supervisor import Setup, Supervisor
from trimtab.options import signal_exit_code
from trimtab.report.live_page import LivePage, PageError
from trimtab.run_record import Recorder
from trimtab.run_samples import Run, Sample, stage_samples
from trimtab_loadtester.attack import Progress
from trimtab_loadtester.results import Results

SAMPLE_SECONDS = 1.0
FaultInjector = Callable[[Supervisor], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class LocalRun:
    """A run on this machine."""

    title: str
    setup: Setup
    load: LoadOptions | None = None
    """The load to send; None sends none."""
    duration_seconds: float | None = None
    """Duration of a run without a load; None runs until SIGINT or SIGTERM."""
    on_ready: Callable[["LocalRun"], None] = lambda _: None
    """Called once the first plan is in force."""
    on_sample: Callable[["LocalRun"], None] = lambda _: None
    fault_injector: FaultInjector | None = None
    """Coroutine that runs during the load."""
    page_port: int = -1
    """Port of the live page; 0: a free port, -1: no live page."""
    page: LivePage | None = field(init=False, default=None)
    page_error: str = ""
    supervisor: Supervisor = field(init=False)
    recorder: Recorder = field(init=False)
    recent_samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=2))
    """The newest two samples; all are in the run folder."""
    sample_count: int = 0
    progress: Progress | None = None
    end_signal: signal.Signals | None = None
    """The first SIGINT or SIGTERM before the run's end."""
    ready_seconds: float = 0.0
    _cpu_seconds: dict[int, float] = field(default_factory=dict)

    @property
    def interruption_code(self) -> int | None:
        """Exit code of a run that a signal ended early, else None."""
        return None if self.end_signal is None else signal_exit_code(self.end_signal)

    async def run(self) -> Run:
        """Start, serve, stop, and return the run; SIGINT and SIGTERM end it early and cleanly.

        Raises StartError if a process did not start. Raises DocumentError if the pipeline or the plan cannot be used.
        """
        self.supervisor = Supervisor(self.setup)
        self.recorder = Recorder(self.setup.folder, self.title, self.supervisor.pipeline)
        await self._start_page()
        try:
            run = await self._run_until_end()
        except BaseException:
            if self.page is not None:
                await self.page.stop()
            raise
        if self.page is not None:
            await self.page.finish(run)
        return run

    async def _start_page(self) -> None:
        """Serve the live page; if its port is taken, the run continues without it."""
        if self.page_port < 0:
            return
        page = LivePage(self.setup.folder, self.page_port)
        try:
            await page.start()
        except PageError as error:
            self.page_error = str(error)
        else:
            self.page = page

    async def _run_until_end(self) -> Run:
        end_signal: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()
        with _first_signal(end_signal):
            serving = asyncio.create_task(self._serve())
            ends: set[asyncio.Future[Any]] = {serving, end_signal}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                self.end_signal = end_signal.result()
                serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving
        results = serving.result() if self.end_signal is None else None
        faults = tuple(self.supervisor.faults)
        self.recorder.write_facts(faults, self.ready_seconds)
        samples, plans = self.recorder.samples(), self.recorder.plans()
        return Run(self.title, self.supervisor.pipeline, samples, plans, results, faults, self.ready_seconds)

    async def _serve(self) -> Results | None:
        start = time.monotonic()
        self.recorder.start(self.setup.plan if self.setup.profiles_file is None else None)
        async with self.supervisor as supervisor:
            await supervisor.ready()
            self.ready_seconds = time.monotonic() - start
            self.on_ready(self)
            tasks = [asyncio.create_task(self._record_samples())]
            if self.fault_injector is not None:
                tasks.append(asyncio.create_task(self.fault_injector(supervisor)))
            try:
                return await self._send_load()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                with suppress(RouterUnreachable):
                    self.record_sample(await self._take_sample())  # what happened since the last one
                supervisor.raise_failure()

    async def _send_load(self) -> Results | None:
        if self.load is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.duration_seconds):
                    await asyncio.Event().wait()
            return None
        port = self.supervisor.grpc_port if self.load.protocol == "gRPC" else self.supervisor.rest_port
        folder = self.setup.folder / "load"
        process = await LoadProcess.start(self.setup.pipeline_file, f"127.0.0.1:{port}", self.load, folder)
        try:
            async for progress in process.progress():
                self.progress = progress
            return await process.results()
        finally:
            await process.stop()

    async def _record_samples(self) -> None:
        due = time.monotonic()
        while True:
            with suppress(RouterUnreachable):
                self.record_sample(await self._take_sample())
            due = max(due + SAMPLE_SECONDS, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    def record_sample(self, sample: Sample) -> None:
        self.recent_samples.append(sample)
        self.sample_count += 1
        previous_error = self.recorder.disk_error
        self.recorder.add(sample, self.supervisor.faults, self.ready_seconds)
        error = self.recorder.disk_error
        if error != previous_error:
            self.supervisor.record_fault(
                f"samples cannot be written: {error}; they are kept in memory"
                if error
                else "samples can be written again; none is lost"
            )
        self.on_sample(self)

    async def _take_sample(self) -> Sample:
        supervisor = self.supervisor
        state, counters = await supervisor.client.state(), await supervisor.client.counters()
        now = time.time()
        seconds = now - self.recent_samples[-1].at if self.recent_samples else SAMPLE_SECONDS
        busy = self._cores_busy(supervisor.replica_manager.pids, seconds)
        scores = (self.progress.correct, self.progress.total) if self.progress else (0, 0)
        return Sample(now, stage_samples([state]), supervisor.replica_manager.cores, busy, counters, *scores)

    def _cores_busy(self, pids: Mapping[str, int], seconds: float) -> float:
        """Cores used by the replicas since the last call; a new process counts from its second sample."""
        cpu_seconds = {}
        for pid in pids.values():
            with suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                cpu_seconds[pid] = times.user + times.system
        busy = sum(after - self._cpu_seconds.get(pid, after) for pid, after in cpu_seconds.items())
        self._cpu_seconds = cpu_seconds
        return busy / seconds


@contextmanager
def _first_signal(received: "asyncio.Future[signal.Signals]") -> Iterator[None]:
    """Set the future to the first SIGINT or SIGTERM while the block runs."""

    def on_signal(number: signal.Signals) -> None:
        if not received.done():
            received.set_result(number)

    loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number, handler in previous.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
