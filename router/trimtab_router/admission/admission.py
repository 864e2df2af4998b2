"""`Admission`: admits requests within the concurrency limit and the memory budget, and parses them."""

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol import PendingRequest
from trimtab_router.admission.concurrency_controller import ConcurrencyController
from trimtab_router.admission.concurrency_limit import ConcurrencyLimit, LimitBounds
from trimtab_router.admission.entry_gate import EntryGate
from trimtab_router.admission.memory_budget import MemoryBudget, Reservation
from trimtab_router.admission.request_parsing import decoded_bytes, decoding_bytes, parse_request, validate_header
from trimtab_router.admission.tenant import is_slow_to_rewrite, options_inputs, set_tenant
from trimtab_router.limits import Limits
from trimtab_router.refusal import draining
from trimtab_router.request import Call

PATIENCE_SHARE = 0.2
"""Maximum time that a request may wait for admission, as a share of the SLO. The rest must suffice to serve it."""
COLLECTION_SECONDS = 0.1
"""Delay of a garbage collection: the request's task ends first, and requests that end meanwhile are covered too."""


class Admission:
    """Admission of one pipeline's requests. `bounds` returns None while those of plan and replicas are unknown."""

    def __init__(self, pipeline: InferencePipeline, limits: Limits, bounds: Callable[[], LimitBounds | None]) -> None:
        slo = pipeline.spec.slo
        self.draining = False
        """Whether requests are rejected."""
        self.memory = MemoryBudget(
            limits.max_bytes_in_flight, limits.max_client_requests, limits.max_client_bytes, self._collect_soon
        )
        self.concurrency = ConcurrencyController(ConcurrencyLimit(slo.latency_seconds), self.memory, bounds)
        self._pipeline = pipeline
        self._entry_gate = EntryGate(PATIENCE_SHARE * slo.first_response_seconds)
        self._options_inputs = options_inputs(pipeline.spec)
        self._decoder = ThreadPoolExecutor(1, "decode")  # one thread, which bounds temporary memory too
        self._collection: asyncio.TimerHandle | None = None

    async def admit(self, arrived_at: float, client: str = "") -> Reservation:
        """Admit a request at its turn of the event loop. Raises Refusal: overload, or the client has too many."""
        self.concurrency.check_capacity()
        reservation = self.memory.reservation(client)
        try:
            await self._entry_gate.enter(arrived_at)
        except BaseException:
            reservation.end()
            raise
        return reservation

    async def parse(self, pending: PendingRequest, reservation: Reservation) -> Call:
        """Validate and decode a request, its description before any value, in a thread if that is slow.

        The reservation grows by the memory of decoding. Raises Refusal, or ProtocolError for values that contradict the
        description.
        """
        if not (pending.slow or is_slow_to_rewrite(self._options_inputs, pending.inputs)):
            return self._parse(pending, reservation.client)
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
        call = parse_request(self._pipeline.name, self._pipeline.spec, pending)
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
