"""One batch at a time: the thread that computes, beside the event loop that answers.

A replica owns its cores for one batch; two at once would only make both slower than their profile says. The thread
leaves the event loop free, so that health checks answer while a batch computes.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Generic, TypeVar

from trimtab_model_servers.errors import RefusalError
from trimtab_model_servers.event_loops import call_soon_threadsafe_if_open

Result = TypeVar("Result")
DEFAULT_MAX_WAITING = 64


class _Job(Generic[Result]):
    """A batch on its way through the thread and back to the loop that waits for it."""

    __slots__ = ("begun", "begun_at", "future", "loop", "work")

    def __init__(self, work: Callable[[], Result], loop: asyncio.AbstractEventLoop) -> None:
        self.work = work
        self.loop = loop
        self.begun = False
        self.begun_at = 0.0
        self.future: asyncio.Future[Result] = loop.create_future()

    def run(self) -> None:
        if self.future.cancelled():
            return
        self.begun = True
        self.begun_at = perf_counter()
        try:
            result = self.work()
        except BaseException as error:  # noqa: BLE001  (whoever waits for the batch must learn of any failure)
            call_soon_threadsafe_if_open(self.loop, self._fail, _tellable(error))
        else:
            call_soon_threadsafe_if_open(self.loop, self._succeed, result)

    def abandon(self) -> None:
        """Nobody waits any more: give the place in the queue free, and do not compute what has not begun."""
        if not self.begun:
            self.future.cancel()

    def _succeed(self, result: Result) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def _fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


def _tellable(error: BaseException) -> BaseException:
    """The error as a future takes it: StopIteration, which would end whoever waits, as the cause of another."""
    if not isinstance(error, StopIteration):
        return error
    told = RuntimeError(f"it raised {error!r}")
    told.__cause__ = error
    return told


class BatchWorker:
    """A thread that runs one piece of work after another, for callers on an event loop.

    Args:
        max_waiting: batches that may wait behind the one that computes; more are refused.
    """

    def __init__(self, max_waiting: int = DEFAULT_MAX_WAITING) -> None:
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._max_waiting = max_waiting
        self._unfinished = 0
        self._elsewhere = 0
        self.draining = False
        self.last_asked_at = float("-inf")
        """When the latest batch was asked for, by the event loop's clock."""
        self._idle = asyncio.Event()
        self._idle.set()

    async def batch(self, work: Callable[[], Result]) -> tuple[Result, float]:
        """Run a batch in its turn; return its result, and the seconds it waited for batches before it.

        Raises:
            RefusalError: 503 while draining, 429 when too many batches wait.
        """
        self.last_asked_at = asyncio.get_running_loop().time()
        self._refuse_while_draining()
        if self._unfinished > self._max_waiting:
            raise RefusalError(429, f"{self._max_waiting} batches wait already; send fewer at once")
        asked_at, others = perf_counter(), self._unfinished
        job = self._put(work)
        result = await self._done(job)
        return result, job.begun_at - asked_at if others else 0.0

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run work in its turn, whatever waits."""
        return await self._done(self._put(work))

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Count work that another thread does: a drain waits for it too.

        Raises:
            RefusalError: 503 while draining.
        """
        self.last_asked_at = asyncio.get_running_loop().time()
        self._refuse_while_draining()
        self._elsewhere += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._elsewhere -= 1
            self._settle()

    def _refuse_while_draining(self) -> None:
        if self.draining:
            raise RefusalError(503, "this replica is shutting down; send the batch to another one")

    def _settle(self) -> None:
        if not self._unfinished and not self._elsewhere:
            self._idle.set()

    def _put(self, work: Callable[[], Result]) -> "_Job[Result]":
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="batches", daemon=True)
            self._thread.start()
        job = _Job(work, asyncio.get_running_loop())
        self._unfinished += 1
        self._idle.clear()
        self._jobs.put(job)
        job.future.add_done_callback(self._finished)
        return job

    async def _done(self, job: "_Job[Result]") -> Result:
        try:
            return await asyncio.shield(job.future)
        except asyncio.CancelledError:
            job.abandon()
            raise

    async def drain(self) -> None:
        """Refuse new batches from now on, and wait until those accepted are done."""
        self.draining = True
        await self._idle.wait()

    def close(self) -> None:
        """End the thread once it has nothing left to do."""
        if self._thread is not None:
            self._jobs.put(None)

    def _finished(self, future: "asyncio.Future[Any]") -> None:
        if not future.cancelled():
            future.exception()  # seen, even if whoever waited has gone
        self._unfinished -= 1
        self._settle()

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            del job  # or it would hold the batch's tensors until the next one comes
