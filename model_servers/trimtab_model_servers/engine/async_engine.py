"""A core on a thread of its own: anybody may submit, cancel and listen.

What was asked meanwhile is done between steps, so that a cancelled request has given everything back within one step.
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

from trimtab_model_servers.engine.core import EngineCore, Event, Gauges, Tell
from trimtab_model_servers.engine.request import EngineBusy, Request, TokenChunk
from trimtab_model_servers.engine.stop_strings import Spell
from trimtab_model_servers.event_loops import call_soon_threadsafe_if_open

_LOG = logging.getLogger(__name__)
_Told = tuple["asyncio.Queue[Event | Exception]", Event | Exception]


@dataclass(slots=True, eq=False)
class _StepOutput:
    """What one step says to one loop: all of answers that begin with it, and of those that go on."""

    begins: list[_Told] = field(default_factory=list)
    goes_on: list[_Told] = field(default_factory=list)


class AsyncEngine:
    """Runs a core until ``stop``; its thread computes with ``threads`` threads (None: as many as torch takes).

    Attributes:
        failure: why it will never answer again, once it has failed itself and everybody was told.
    """

    def __init__(self, core: EngineCore, *, threads: int | None = None) -> None:
        self.failure: Future[str] = Future()
        self._core = core
        self._gauges = Gauges()
        self._threads = threads
        self._asked: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._told: dict[asyncio.AbstractEventLoop, _StepOutput] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def gauges(self) -> Gauges:
        """What is in flight, as of the last step and of what was asked before it; for any thread."""
        return self._gauges

    def submit(self, request: Request, images: Sequence[Tensor | None], tell: Tell) -> None:
        """Take a request in; the thread calls ``tell`` with its pieces and, last, with how it ended.

        Waits for the step under way, so that what is wrong with a request is raised here.

        Raises:
            RequestError: it can never be served as it is.
            EngineBusy: as many wait already as may, or the engine stops.
        """
        refused: list[BaseException] = []
        answered = threading.Event()

        def take() -> None:
            try:
                self._core.submit(request, images, tell)
            except BaseException as error:  # noqa: BLE001  (raised to the caller)
                refused.append(error)
            answered.set()

        self._ask(take, taking=True)
        answered.wait()
        if refused:
            raise refused[0]

    def supply(self, request_id: str, embeddings: Mapping[int, Tensor]) -> None:
        """Bring images, by their number, that were still encoded when their request was submitted."""
        self._ask(lambda: self._core.supply(request_id, embeddings))

    def fail(self, request_id: str, error: str) -> None:
        """End a request in error: an image of it will not come."""
        self._ask(lambda: self._core.fail(request_id, error))

    def cancel(self, request_id: str) -> None:
        """Let go of a request within one step; nothing happens where it ended already."""
        self._ask(lambda: self._core.cancel(request_id))

    def stop(self) -> None:
        """Serve what was taken in to its end, refuse the rest, and end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    async def stream(self, request: Request, images: Sequence[Tensor | None]) -> AsyncGenerator[Event, None]:
        """Yield a request's events up to its last word; who stops listening cancels it.

        Raises:
            RequestError: it can never be served as it is.
            EngineBusy: as many wait already as may, or the engine stops.
        """
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event | Exception]()
        ours = False
        began_in: _StepOutput | None = None

        def tell(event: Event | Exception) -> None:
            nonlocal began_in
            if loop.is_closed():
                raise RuntimeError("nobody listens any more")
            said = self._told.setdefault(loop, _StepOutput())
            began_in = began_in or said
            (said.begins if said is began_in else said.goes_on).append((events, event))

        def take() -> None:
            nonlocal ours
            try:
                self._core.submit(request, images, tell)
                ours = True
            except Exception as error:  # noqa: BLE001  (raised to the caller)
                tell(error)

        def let_go() -> None:
            if ours:  # or another's request of the same id would end
                self._core.cancel(request.id)

        self._ask(take, taking=True)
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
                self._ask(let_go)

    def _ask(self, act: Callable[[], None], *, taking: bool = False) -> None:
        """Have the thread act between steps; one that stops takes no more requests in, one that ended does nothing."""
        with self._wake:
            if taking and (self._stopping or not self._thread.is_alive()):
                raise EngineBusy("the engine stops; another one should be asked")
            self._asked.append(act)
            self._wake.notify()

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            while self._act():
                pass
        except Exception as error:  # noqa: BLE001  (whoever waits must learn of any failure)
            _LOG.exception("the engine itself failed; every request in flight ends")
            with self._wake:
                self._stopping = True
            self._give_up(f"the engine failed: {type(error).__name__}: {error}")

    def _give_up(self, why: str) -> None:
        try:
            self._do_asked()
            self._core.fail_all(why)
            self._gauges = self._core.gauges
            self._deliver()
        finally:
            self.failure.set_result(why)

    def _act(self) -> bool:
        """Do what was asked, compute a step, or wait; False when there is nothing left to do."""
        self._do_asked()
        stepped = self._core.step()
        if stepped:
            self._gauges = self._core.gauges
        self._deliver()
        if stepped:
            return True
        with self._wake:
            if not self._asked:
                if self._stopping:
                    return False
                self._wake.wait()
        return True

    def _do_asked(self) -> None:
        if not self._asked:
            return
        while self._asked:
            self._asked.popleft()()
        self._gauges = self._core.gauges

    def _deliver(self) -> None:
        """Wake each loop once for all that a step says: a wake for each word costs more than the words."""
        told, self._told = self._told, {}
        for loop, said in told.items():
            call_soon_threadsafe_if_open(loop, _hand_out, said, loop)


def _hand_out(said: _StepOutput, loop: asyncio.AbstractEventLoop) -> None:
    """First words have left for the network before whoever goes on is woken: a loop writes when a turn of it ends.

    What goes on always waits for the next turn, or a step could overtake the one before it.
    """
    _put(said.begins)
    if said.goes_on:
        loop.call_soon(_put, said.goes_on)


def _put(told: Sequence[_Told]) -> None:
    for events, event in told:
        events.put_nowait(event)


def spelling(tokenizer: Tokenizer) -> Callable[[], Spell]:
    """Start to spell one answer after another with a tokenizer of the tokenizers library."""

    def start() -> Spell:
        stream: Any = DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(tokenizer, token) or ""

    return start
