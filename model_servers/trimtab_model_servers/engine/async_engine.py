"""`AsyncEngine`: an engine core on its own thread; any thread or event loop may submit, cancel and listen.

Calls are executed between steps, so that a cancelled request releases all of its resources within one step.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor

from trimtab_model_servers.batch_worker import call_soon_threadsafe_if_open
from trimtab_model_servers.engine.core import EngineCore, EngineEvent, EventListener, Gauges
from trimtab_model_servers.engine.request import EngineBusy, Request, TokenChunk
from trimtab_model_servers.engine.stop_strings import Detokenize

_LOG = logging.getLogger(__name__)
_Delivery = tuple["asyncio.Queue[EngineEvent | Exception]", EngineEvent | Exception]


@dataclass(slots=True, eq=False)
class _StepOutput:
    """Events of one step for one event loop."""

    first_tokens: list[_Delivery] = field(default_factory=list)
    """Events of requests whose first event is in this step."""
    continuations: list[_Delivery] = field(default_factory=list)


class AsyncEngine:
    """Runs a core until ``stop``; its thread computes with ``threads`` torch threads (None: torch's default)."""

    def __init__(self, core: EngineCore, *, threads: int | None = None) -> None:
        self.failure: Future[str] = Future()
        """Done once the engine itself has failed, after every request has ended; holds the reason."""
        self._core = core
        self._gauges = Gauges()
        self._threads = threads
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._outputs: dict[asyncio.AbstractEventLoop, _StepOutput] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def gauges(self) -> Gauges:
        """State after the last step and the calls before it; for any thread."""
        return self._gauges

    def submit(self, request: Request, images: Sequence[Tensor | None], on_event: EventListener) -> None:
        """Enqueue a request, whose events go to ``on_event``; blocks until it is accepted; errors as of ``stream``."""
        submitted: Future[None] = Future()

        def submit() -> None:
            try:
                self._core.submit(request, images, on_event)
            except BaseException as error:  # noqa: BLE001  (raised to the caller)
                submitted.set_exception(error)
            else:
                submitted.set_result(None)

        self._enqueue(submit, submits=True)
        submitted.result()

    def add_embeddings(self, request_id: str, embeddings: Mapping[int, Tensor]) -> None:
        """Add embeddings, by image number, of images that were still encoded when their request was submitted."""
        self._enqueue(lambda: self._core.add_embeddings(request_id, embeddings))

    def fail(self, request_id: str, error: str) -> None:
        """End a request in error, because an image could not be encoded or fetched."""
        self._enqueue(lambda: self._core.fail(request_id, error))

    def cancel(self, request_id: str) -> None:
        """End a request within one step; ignored if it has ended."""
        self._enqueue(lambda: self._core.cancel(request_id))

    def stop(self) -> None:
        """Finish the requests in flight, reject new ones, and end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    async def stream(self, request: Request, images: Sequence[Tensor | None]) -> AsyncGenerator[EngineEvent, None]:
        """Yield a request's events; raises RequestError or EngineBusy. Closing the generator cancels the request."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue[EngineEvent | Exception]()
        submitted = False
        first_output: _StepOutput | None = None

        def on_event(event: EngineEvent | Exception) -> None:
            nonlocal first_output
            if loop.is_closed():
                raise RuntimeError("the event loop is closed")
            output = self._outputs.setdefault(loop, _StepOutput())
            first_output = first_output or output
            (output.first_tokens if output is first_output else output.continuations).append((events, event))

        def submit() -> None:
            nonlocal submitted
            try:
                self._core.submit(request, images, on_event)
                submitted = True
            except Exception as error:  # noqa: BLE001  (raised to the caller)
                on_event(error)

        def cancel() -> None:
            if submitted:  # else another request with the same id would end
                self._core.cancel(request.id)

        self._enqueue(submit, submits=True)
        ended = False
        try:
            while not ended:
                event = await events.get()
                ended = not isinstance(event, TokenChunk)
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            if not ended:
                self._enqueue(cancel)

    def _enqueue(self, call: Callable[[], None], *, submits: bool = False) -> None:
        """Execute a call on the thread between steps; once the engine stops, submissions are rejected."""
        with self._wake:
            if submits and (self._stopping or not self._thread.is_alive()):
                raise EngineBusy("the engine stops; send the request to another replica")
            self._calls.append(call)
            self._wake.notify()

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            while self._run_once():
                pass
        except BaseException as error:  # noqa: BLE001  (every waiting request must end; a panic of tokenizers is no Exception)
            _LOG.exception("the engine failed; every request in flight ends")
            with self._wake:
                self._stopping = True
            self._fail_all(f"the engine failed: {type(error).__name__}: {error}")

    def _fail_all(self, reason: str) -> None:
        try:
            self._execute_calls()
            self._core.fail_all(reason)
            self._gauges = self._core.gauges
            self._deliver()
        finally:
            self.failure.set_result(reason)

    def _run_once(self) -> bool:
        """Execute pending calls, then compute a step or wait; False once the engine has stopped."""
        self._execute_calls()
        stepped = self._core.step()
        if stepped:
            self._gauges = self._core.gauges
        self._deliver()
        if stepped:
            return True
        with self._wake:
            if not self._calls:
                if self._stopping:
                    return False
                self._wake.wait()
        return True

    def _execute_calls(self) -> None:
        if not self._calls:
            return
        while self._calls:
            self._calls.popleft()()
        self._gauges = self._core.gauges

    def _deliver(self) -> None:
        """Wake each event loop once for all events of a step: a wake-up per token costs more than the token."""
        outputs, self._outputs = self._outputs, {}
        for loop, output in outputs.items():
            call_soon_threadsafe_if_open(loop, _put_output, output, loop)


def _put_output(output: _StepOutput, loop: asyncio.AbstractEventLoop) -> None:
    """Put first tokens at once and the others in the next loop iteration, after the first have been written to sockets.

    The others always wait for the next iteration, so that steps stay in order.
    """
    _put(output.first_tokens)
    if output.continuations:
        loop.call_soon(_put, output.continuations)


def _put(deliveries: Sequence[_Delivery]) -> None:
    for events, event in deliveries:
        events.put_nowait(event)


def detokenizer_factory(tokenizer: Tokenizer) -> Callable[[], Detokenize]:

    def new_detokenizer() -> Detokenize:
        stream: Any = DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(tokenizer, token) or ""

    return new_detokenizer
