"""`BatchWorker`: the thread that computes batches, one at a time, while the event loop stays responsive.

A replica gives all of its cores to one batch: two concurrent batches would each be slower than profiled.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Generic, TypeVar

from trimtab_model_servers.errors import RefusalError

Result = TypeVar("Result")
DEFAULT_MAX_WAITING = 64


def call_soon_threadsafe_if_open(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any) -> None:
    """Schedule a callback from any thread; ignored if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *args)


class _Job(Generic[Result]):
    """A batch, from the queue to the event loop that awaits it."""

    __slots__ = ("future", "loop", "started", "started_at", "work")

    def __init__(self, work: Callable[[], Result], loop: asyncio.AbstractEventLoop) -> None:
        self.work = work
        self.loop = loop
        self.started = False
        self.started_at = 0.0
        self.future: asyncio.Future[Result] = loop.create_future()

    def run(self) -> None:
        if self.future.cancelled():
            return
        self.started = True
        self.started_at = perf_counter()
        try:
            settle = partial(self.future.set_result, self.work())
        except BaseException as error:  # noqa: BLE001  (passed to the caller)
            settle = partial(self.future.set_exception, _future_exception(error))
        call_soon_threadsafe_if_open(self.loop, self._settle, settle)

    def abandon(self) -> None:
        """Cancel the job unless it has started; its caller no longer waits."""
        if not self.started:
            self.future.cancel()

    def _settle(self, settle: Callable[[], None]) -> None:
        if not self.future.done():
            settle()


def _future_exception(error: BaseException) -> BaseException:
    """An exception that a future accepts: StopIteration, which it does not, becomes the cause of a RuntimeError."""
    if not isinstance(error, StopIteration):
        return error
    wrapper = RuntimeError(f"it raised {error!r}")
    wrapper.__cause__ = error
    return wrapper


class BatchWorker:
    """A thread that runs jobs one after another; at most ``max_waiting`` batches wait, more are rejected."""

    def __init__(self, max_waiting: int = DEFAULT_MAX_WAITING) -> None:
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._max_waiting = max_waiting
        self._unfinished = 0
        self._external = 0
        self.draining = False
        self.last_batch_at = float("-inf")
        """Time of the latest request by the event loop's clock."""
        self._idle = asyncio.Event()
        self._idle.set()

    async def run_batch(self, work: Callable[[], Result]) -> tuple[Result, float]:
        """Run a batch; return its result and the seconds it waited; RefusalError 503 while draining, 429 if full."""
        self.last_batch_at = asyncio.get_running_loop().time()
        self._reject_while_draining()
        if self._unfinished > self._max_waiting:
            raise RefusalError(429, f"{self._max_waiting} batches wait already; send fewer at once")
        queued_at, earlier = perf_counter(), self._unfinished
        job = self._enqueue(work)
        result = await self._result(job)
        return result, job.started_at - queued_at if earlier else 0.0

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run a job, regardless of the number of waiting batches."""
        return await self._result(self._enqueue(work))

    @contextlib.contextmanager
    def external_work(self) -> Iterator[None]:
        """Register work of another thread, which a drain waits for too; raises RefusalError 503 while draining."""
        self.last_batch_at = asyncio.get_running_loop().time()
        self._reject_while_draining()
        self._external += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._external -= 1
            self._update_idle()

    def _reject_while_draining(self) -> None:
        if self.draining:
            raise RefusalError(503, "this replica is shutting down; send the batch to another one")

    def _update_idle(self) -> None:
        if not self._unfinished and not self._external:
            self._idle.set()

    def _enqueue(self, work: Callable[[], Result]) -> "_Job[Result]":
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_jobs, name="batches", daemon=True)
            self._thread.start()
        job = _Job(work, asyncio.get_running_loop())
        self._unfinished += 1
        self._idle.clear()
        self._jobs.put(job)
        job.future.add_done_callback(self._on_finished)
        return job

    async def _result(self, job: "_Job[Result]") -> Result:
        try:
            return await asyncio.shield(job.future)
        except asyncio.CancelledError:
            job.abandon()
            raise

    async def drain(self) -> None:
        """Reject new batches, and wait until the accepted ones are finished."""
        self.draining = True
        await self._idle.wait()

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)

    def _on_finished(self, future: "asyncio.Future[Any]") -> None:
        if not future.cancelled():
            future.exception()  # retrieved, in case nothing awaits it
        self._unfinished -= 1
        self._update_idle()

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            del job  # else it would keep the batch's tensors until the next one arrives
