"""Shell around the model servers: connections, health, and one batch from here to there and back.

A replica is ready for a variant once its data port says so; losing a connection, a probe that fails or an answer that
it is not ready takes that back at once, and a probe brings it back. Whoever dispatches sees only `Replica`, so that
another wire can take the place of this one. What a model server not of ours calls its models, and whether it reads
binary tensors, is settled here too.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy as np

from trimtab_pipelines.routing import Endpoint
from trimtab_protocol import Buffer, InferResponse, Parameters, ProtocolError, Tensor, rest
from trimtab_protocol.text import told
from trimtab_router.connection import (
    ConnectionBroken,
    ConnectionPool,
    HttpConnection,
    PeerRefused,
    Reply,
    Tls,
    request_head,
)

log = logging.getLogger(__name__)

PROBE_INTERVAL_SECONDS = 1.0
PROBE_TIMEOUT_SECONDS = 5.0
FIRST_BACKOFF_SECONDS = 0.05
MAX_PROBE_BYTES = 2**20
JSON_MULTIPLE = 16
"""How many times its binary size a tensor may have as JSON."""
BINARY_EXTENSION = "binary_tensor_data"


class ReplicaLost(Exception):  # noqa: N818 - reads as what happened
    """The replica went away, did not answer in time, or answered another batch than it was given.

    `delivered` says whether the batch may have reached it.
    """

    def __init__(self, message: str, *, delivered: bool = True) -> None:
        super().__init__(message)
        self.delivered = delivered


class ReplicaRefused(Exception):  # noqa: N818 - reads as what happened
    """The replica answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A batch for a replica: for each input its pieces, one after the other.

    `id` is what its answer must bear; `most_answer_bytes` is all that can honestly be answered to it.
    """

    id: str
    variant: str
    inputs: Sequence[Sequence[Tensor]]
    parameters: Parameters
    headers: Mapping[str, str]
    timeout_seconds: float
    most_answer_bytes: int


class Replica:
    """One model server as the router sees it.

    Args:
        endpoint: where it is and what it says it can serve.
        on_change: called whenever its readiness changed.
        concurrency: batches it may hold at once.
        tls: what connections to it are secured with.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        on_change: Callable[[], None],
        *,
        concurrency: int = 1,
        tls: Tls = lambda: None,
    ) -> None:
        self.endpoint = endpoint
        self.refused = ""
        """Why it gets no work, where it is not who it must be."""
        self.inflight = 0
        self.last_used = 0
        self.completed_at = float("-inf")
        self.transfer_seconds = 0.0
        self.takes_ahead = False
        """Whether it may hold a second, full batch, because it will be free by the time that one arrives."""
        self._ahead: asyncio.TimerHandle | None = None
        self._concurrency = concurrency
        self._on_change = on_change
        self._ready: frozenset[str] = frozenset()
        self._reads_binary = True
        self._probe: HttpConnection | None = None
        self._doubted = asyncio.Event()
        self._stale = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        host, _, port = endpoint.address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._tls = tls
        self._connections = ConnectionPool(self._host, self._port, tls)
        self._watcher = asyncio.get_running_loop().create_task(self._watch(), name=f"watch {endpoint.name}")

    @property
    def name(self) -> str:
        """The endpoint's name."""
        return self.endpoint.name

    @property
    def ready_variants(self) -> frozenset[str]:
        """The variants it can serve now; none while it drains."""
        return frozenset() if self.endpoint.draining else self._ready

    @property
    def free(self) -> bool:
        """Whether it can take a batch now."""
        return self.inflight < self._concurrency and bool(self.ready_variants)

    def update(self, endpoint: Endpoint) -> None:
        """Take a new description of the same address."""
        known, self.endpoint = self.endpoint, endpoint
        if known.variants != endpoint.variants or known.model_names != endpoint.model_names:
            self._set_ready(self._ready & frozenset(endpoint.variants))  # what it goes on to offer stays in service
            self._stale.set()

    def take(self, use: int) -> None:
        """Hold one more batch; `use` counts the stage's batches."""
        self.inflight += 1
        self.last_used = use
        self.takes_ahead = False
        self._empty.clear()

    def release(self, now: float) -> None:
        """Hold one batch less, from now (monotonic seconds)."""
        self.inflight -= 1
        self.completed_at = now
        self.takes_ahead = False
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None
        if not self.inflight:
            self._empty.set()

    def open_ahead(self, seconds: float, wake: Callable[[], None]) -> None:
        """In so many seconds take a second batch, and call `wake`."""

        def opened() -> None:
            self.takes_ahead = bool(self.ready_variants)
            wake()

        self._ahead = asyncio.get_running_loop().call_later(max(seconds, 0.0), opened)

    async def retire(self) -> None:
        """Close, once the batches it holds are answered. Whoever calls gives it no more of them."""
        await self._empty.wait()
        await self.close()

    def doubt(self) -> None:
        """Something went wrong with it: not ready until a probe says otherwise."""
        self._doubted.set()
        self._set_ready(frozenset())

    async def infer(self, batch: BatchRequest) -> InferResponse:
        """Serve a batch.

        Raises:
            ReplicaLost: it went away, took too long or answered another batch.
            ReplicaRefused: it answered with an error.
            ProtocolError: its answer cannot be read.
        """
        body, headers = _encoded(batch) if self._reads_binary else _encoded_as_json(batch)
        path = self._path(batch.variant, "infer")
        head = request_head("POST", path, self.endpoint.address, headers, sum(map(len, body)))
        delivered = False
        try:
            async with asyncio.timeout(batch.timeout_seconds):
                connection = await self._connections.take()
                delivered = True
                reply = await connection.exchange(head, body, most_body_bytes=self._most_answer_bytes(batch))
        except TimeoutError as error:
            message = f"{self.name} gave no answer within {batch.timeout_seconds:.1f} s"
            raise ReplicaLost(message, delivered=delivered) from error
        except ConnectionBroken as error:
            raise ReplicaLost(f"{self.name}: {error}", delivered=delivered) from error
        try:
            answer = self._read(batch, reply)
        except ReplicaRefused:
            self._connections.give_back(connection)
            raise
        except (ReplicaLost, ProtocolError):
            connection.close()  # whatever comes on it next may be another's
            raise
        self._connections.give_back(connection)
        return answer

    def _most_answer_bytes(self, batch: BatchRequest) -> int:
        """As many as the tensors have; a server not of ours may write them as JSON."""
        return batch.most_answer_bytes * (JSON_MULTIPLE if self.endpoint.model_names else 1)

    def _read(self, batch: BatchRequest, reply: Reply) -> InferResponse:
        if reply.status != 200:
            error = _error_of(reply)
            self._check_id(batch, str(error.get("id", "")), needed=False)
            raise ReplicaRefused(reply.status, told(str(error.get("error", f"HTTP status {reply.status}"))))
        answer = rest.decode_response(reply.body, reply.headers.get(rest.HEADER_LENGTH.lower()))
        self._check_id(batch, answer.id, needed=not self.endpoint.model_names)
        return answer

    def _check_id(self, batch: BatchRequest, received: str, *, needed: bool) -> None:
        """Raise ReplicaLost for the answer to another batch; servers not of ours may leave the id out."""
        if received != batch.id and (received or needed):
            raise ReplicaLost(f"{self.name} answered {told(received, 64)!r} to batch {batch.id!r}")

    async def close(self) -> None:
        """Stop watching and close all connections."""
        self._watcher.cancel()
        await asyncio.gather(self._watcher, return_exceptions=True)
        self._connections.close()
        if self._probe is not None:
            self._probe.close()

    async def _watch(self) -> None:
        backoff_seconds = FIRST_BACKOFF_SECONDS
        while True:
            self._doubted.clear()
            self._stale.clear()
            ready = await self._probe_variants()
            if not self._doubted.is_set():  # a probe that was asked before the doubt says nothing against it
                self._set_ready(ready & frozenset(self.endpoint.variants))
            doubted = await self._pause(PROBE_INTERVAL_SECONDS if ready else backoff_seconds)
            if doubted:  # one that fails while it says that it is ready is not asked again at once
                await asyncio.sleep(backoff_seconds)
            healthy = ready and not doubted
            backoff_seconds = FIRST_BACKOFF_SECONDS if healthy else min(2 * backoff_seconds, PROBE_INTERVAL_SECONDS)

    def _set_ready(self, ready: frozenset[str]) -> None:
        if ready != self._ready:
            log.info("replica %s: ready for %s", self.name, ", ".join(sorted(ready)) or "nothing")
            self._ready = ready
            self._on_change()

    async def _pause(self, seconds: float) -> bool:
        """Wait, but not beyond the moment the replica is lost, doubted or described anew; tell if it is in doubt."""
        events = [asyncio.ensure_future(event.wait()) for event in (self._doubted, self._stale)]
        watched: list[asyncio.Future[Any]] = [*events, *([self._probe.closed] if self._probe else [])]
        try:
            await asyncio.wait(watched, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for event in events:
                event.cancel()
        if self._probe is not None and self._probe.closed.done():
            self._probe = None
            self.doubt()
        return self._doubted.is_set()

    async def _probe_variants(self) -> frozenset[str]:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
                probe = await self._probe_connection()
                answers = {variant: await self._ask(probe, variant) for variant in self.endpoint.variants}
        except (ConnectionBroken, TimeoutError) as error:
            log.debug("replica %s: probe failed: %s", self.name, error)
            self._note_refused(str(error) if isinstance(error, PeerRefused) else "")
            if self._probe is not None:
                self._probe.close()
                self._probe = None
            return frozenset()
        self._note_refused("")
        return frozenset(variant for variant, ready in answers.items() if ready)

    async def _probe_connection(self) -> HttpConnection:
        tls = self._tls()
        if self._probe is not None and self._probe.usable and self._probe.tls is tls:
            return self._probe
        if self._probe is not None:
            self._probe.close()
        self._probe = await HttpConnection.open(self._host, self._port, tls)
        self._reads_binary = not self.endpoint.model_names or await self._offers_binary(self._probe)
        return self._probe

    def _note_refused(self, reason: str) -> None:
        if reason and reason != self.refused:
            log.warning("replica %s gets no work: %s", self.name, reason)
        self.refused = reason

    async def _ask(self, connection: HttpConnection, variant: str) -> bool:
        return (await self._get(connection, self._path(variant, "ready"))).status == 200

    async def _offers_binary(self, connection: HttpConnection) -> bool:
        """Whether a server not of ours says that it reads binary tensors; one that says nothing gets JSON."""
        reply = await self._get(connection, "/v2")
        try:
            return reply.status == 200 and BINARY_EXTENSION in json.loads(bytes(reply.body))["extensions"]
        except (ValueError, KeyError, TypeError):
            return False

    async def _get(self, connection: HttpConnection, path: str) -> Reply:
        head = request_head("GET", path, self.endpoint.address, {}, 0)
        return await connection.exchange(head, most_body_bytes=MAX_PROBE_BYTES)

    def _path(self, variant: str, action: str) -> str:
        return f"/v2/models/{quote(self.endpoint.model_names.get(variant, variant), safe='')}/{action}"


def _encoded(batch: BatchRequest) -> tuple[list[Buffer], dict[str, str]]:
    body, header_length = rest.encode_batch(batch.inputs, batch.parameters, batch.id)
    headers = {
        "Content-Type": rest.BINARY_CONTENT_TYPE,
        rest.HEADER_LENGTH: str(header_length),
        **batch.headers,
    }
    return body, headers


def _encoded_as_json(batch: BatchRequest) -> tuple[list[Buffer], dict[str, str]]:
    inputs = [_joined(pieces) for pieces in batch.inputs]
    body = rest.encode_json(inputs, batch.parameters, batch.id)
    return [body], {"Content-Type": rest.JSON_CONTENT_TYPE, **batch.headers}


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    first = pieces[0]
    return Tensor(first.name, first.datatype, np.concatenate([piece.array for piece in pieces]))


def _error_of(reply: Reply) -> dict[str, Any]:
    try:
        error = json.loads(bytes(reply.body))
    except (ValueError, RecursionError):
        return {}
    return error if isinstance(error, dict) else {}
