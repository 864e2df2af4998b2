"""`Admission`: admits requests within the concurrency limit and the memory budget, and parses them."""

import asyncio
import gc
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol import PendingRequest
from trimtab_protocol.chat.internal_wire import OPTIONS
from trimtab_router.admission.chat_bounds import ChatBounds
from trimtab_router.admission.concurrency_limit import FULL_SHARE, ConcurrencyLimit, LimitBounds, LoadSample
from trimtab_router.admission.memory_budget import MemoryBudget, Reservation
from trimtab_router.admission.request_parsing import (
    RequestParser,
    chat_inputs,
    decoded_bytes,
    decoding_bytes,
    is_slow_to_rewrite,
    set_tenant,
    validate_header,
)
from trimtab_router.admission.uploads import Uploads
from trimtab_router.limits import Limits
from trimtab_router.refusal import draining, overload
from trimtab_router.request import Call

SAMPLE_SECONDS = 0.1
OFFERED_WEIGHT = 0.3  # of the newest sample


class ConcurrencyController:
    """Concurrency limit, sampled only while requests are in flight. `bounds` returns None while they are unknown."""

    def __init__(
        self, concurrency_limit: ConcurrencyLimit, memory: MemoryBudget, bounds: Callable[[], LimitBounds | None]
    ) -> None:
        self.concurrency_limit = concurrency_limit
        self._memory = memory
        self._bounds = bounds
        self._loop = asyncio.get_running_loop()
        self.responses = 0  # requests answered since the start
        self.offered_factor = 1.0  # requests offered over those admitted
        self._rejections = 0
        self._sampled = 0, 0  # responses and rejections up to the last sample
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._nearly_full = asyncio.Event()

    def check_capacity(self) -> None:
        if self._timer is None:
            self._schedule_sample()
        if self._memory.active_requests >= self.concurrency_limit.limit:
            self.note_overload()
            raise overload(f"{self._memory.active_requests} requests are in flight, as many as can be served in time")

    def note_response(self) -> None:
        self.responses += 1

    def note_overload(self, requests: int = 1) -> None:
        """Count requests rejected, by the router or by Envoy, because too many are in flight."""
        self._rejections += requests

    async def wait_until_nearly_full(self, max_seconds: float) -> None:
        self._nearly_full.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(max_seconds):
                await self._nearly_full.wait()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule_sample(self) -> None:
        if self._timer is None:
            self._due = time.monotonic() + SAMPLE_SECONDS
            self._timer = self._loop.call_later(SAMPLE_SECONDS, self._take_sample)

    def _take_sample(self) -> None:
        self._timer = None
        now, in_flight = time.monotonic(), self._memory.active_requests
        late_seconds = max(now - self._due, 0.0)
        self._measure_offered()
        self.concurrency_limit.observe(
            LoadSample(now, self.responses, self._rejections, in_flight, late_seconds), self._bounds()
        )
        if in_flight >= FULL_SHARE * self.concurrency_limit.limit:
            self._nearly_full.set()
        if in_flight:
            self._schedule_sample()
        else:
            self.concurrency_limit.reset()
            self.offered_factor = 1.0

    def _measure_offered(self) -> None:
        responses, rejections = self._sampled
        self._sampled = self.responses, self._rejections
        factor = 1.0 + (self._rejections - rejections) / max(self.responses - responses, 1)
        self.offered_factor += OFFERED_WEIGHT * (factor - self.offered_factor)


PER_TURN = 8
MAX_WAITING = 4096


class EntryGate:
    """FIFO queue of requests, of which a few enter per turn of the event loop, so that a flood delays no responses.

    One that waited longer than `max_wait_seconds` is rejected before any work is spent on it.
    """

    def __init__(self, max_wait_seconds: float) -> None:
        self._max_wait_seconds = max_wait_seconds
        self._loop = asyncio.get_running_loop()
        self._remaining = PER_TURN
        self._scheduled = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    def enter_at_once(self) -> bool:
        """Let a request start, unless others wait or enough have started in this turn. Returns whether it may."""
        if not self._scheduled:
            self._schedule()
        if not self._remaining or self._waiting:
            return False
        self._remaining -= 1
        return True

    async def enter(self, arrived_at: float) -> None:
        """Wait until this request may start. Raises Refusal if too many requests wait, or this one waited too long."""
        if self.enter_at_once():
            return
        if len(self._waiting) >= MAX_WAITING:
            raise overload(f"{MAX_WAITING} requests wait to be admitted")
        slot = self._loop.create_future()
        self._waiting.append(slot)
        await slot
        waited = time.monotonic() - arrived_at
        if waited > self._max_wait_seconds:
            raise overload(f"the request waited {waited:.3f} s to be admitted")

    def _schedule(self) -> None:
        self._scheduled = True
        self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._scheduled = False
        self._remaining = PER_TURN
        while self._remaining and self._waiting:
            slot = self._waiting.popleft()
            if not slot.done():
                slot.set_result(None)
                self._remaining -= 1
        if self._waiting:
            self._schedule()


BODY_SECONDS = 10.0  # time for a body to arrive, or the SLO if that is longer
PATIENCE_SHARE = 0.2  # longest wait for admission, as a share of the SLO: the rest must suffice to serve
COLLECTION_SECONDS = 0.1  # delay: the request's task ends first, and requests that end meanwhile are covered too


class Admission:
    """Admission of one pipeline's requests. `bounds` returns None while those of plan and replicas are unknown."""

    def __init__(self, pipeline: InferencePipeline, limits: Limits, bounds: Callable[[], LimitBounds | None]) -> None:
        slo = pipeline.spec.slo
        self.draining = False  # whether requests are rejected
        self.memory = MemoryBudget(
            limits.max_bytes_in_flight, limits.max_client_requests, limits.max_client_bytes, self._collect_soon
        )
        self.uploads = Uploads(self.memory, limits.body_seconds or max(BODY_SECONDS, slo.latency_seconds))
        self.concurrency = ConcurrencyController(ConcurrencyLimit(slo.latency_seconds), self.memory, bounds)
        self._pipeline = pipeline
        self._entry_gate = EntryGate(PATIENCE_SHARE * slo.first_response_seconds)
        self._parser = RequestParser(pipeline.name, pipeline.spec)
        self._options_inputs = chat_inputs(pipeline.spec, OPTIONS)
        self._chat_bounds = ChatBounds.of(pipeline.spec, limits.json_bytes)
        self._has_chats = bool(self._options_inputs or self._chat_bounds.images or self._chat_bounds.messages)
        self._decoder = ThreadPoolExecutor(1, "decode")  # one thread, which bounds temporary memory too
        self._collection: asyncio.TimerHandle | None = None

    async def admit(self, arrived_at: float, client: str = "") -> Reservation:
        """Admit a request at its turn of the event loop. Raises Refusal: overload, or the client has too many."""
        self.concurrency.check_capacity()
        reservation = self.memory.reservation(client)
        if self._entry_gate.enter_at_once():
            return reservation
        try:
            await self._entry_gate.enter(arrived_at)
        except BaseException:
            reservation.end()
            raise
        return reservation

    async def parse(self, pending: PendingRequest, reservation: Reservation) -> Call:
        """Validate and decode a request, its description before any value, in a thread if that is slow.

        The reservation grows by the memory of decoding. Raises Refusal, or ProtocolError for values that contradict the
        description or are no image.
        """
        if self._chat_bounds.images:
            self._chat_bounds.check_counts(pending.inputs)
        if not (pending.slow or (self._options_inputs and is_slow_to_rewrite(self._options_inputs, pending.inputs))):
            return self._parse(pending, reservation.client) if self._has_chats else self._parser.parse(pending)
        validate_header(self._pipeline.name, self._pipeline.spec, pending.request, pending.inputs)
        if self.draining:
            raise draining()
        cost = decoding_bytes(pending, reservation.size_bytes)
        reservation.grow(cost)
        loop = asyncio.get_running_loop()
        call = await loop.run_in_executor(self._decoder, self._parse, pending, reservation.client)
        reservation.record(decoded_bytes(call) - cost)
        return call

    def _parse(self, pending: PendingRequest, client: str) -> Call:
        call = self._parser.parse(pending)
        if self._chat_bounds.images or self._chat_bounds.messages:
            self._chat_bounds.check(call)
        if self._options_inputs:
            set_tenant(call, self._options_inputs, client)
        return call

    def _collect_soon(self) -> None:
        """Schedule a garbage collection after a large request.

        An aborted request leaves an exception whose frames hold its body in a reference cycle. The collector counts
        objects, not bytes, and would free hundreds of MiB only after thousands of other objects have been created. A
        collection takes some milliseconds, because imported objects are frozen.
        """
        if self._collection is None:
            self._collection = asyncio.get_running_loop().call_later(COLLECTION_SECONDS, self._collect)

    def _collect(self) -> None:
        self._collection = None
        gc.collect()

    def close(self) -> None:
        self.concurrency.close()
        if self._collection is not None:
            self._collection.cancel()
        self._decoder.shutdown(wait=False)  # queued requests are still decoded, and then refused
