"""`ReplicaClient`: connections and health of one model server.

A replica is ready for a variant once its data port says so. A lost connection, a failed probe or a not-ready response
revokes that at once, and a later probe restores it. The scheduler sees only `ReplicaSlots`. The client also handles
third-party servers: the names of their models, and whether they read binary tensors.
"""

import asyncio
import json
import logging
import os
import ssl
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from itertools import count
from math import inf
from typing import Any
from urllib.parse import quote, urlsplit

from trimtab_pipelines.endpoints import Endpoint
from trimtab_pipelines.engines import ENGINES, UNKNOWN_ENGINE
from trimtab_pipelines.errors import backoff
from trimtab_protocol import Buffer, InferResponse, ProtocolError, rest
from trimtab_protocol.chat.embedding_refs import EncodedImage, ShareRequest, parse_encoded_image
from trimtab_protocol.chat.internal_wire import (
    IMAGES,
    MAX_PROMPT_TOKENS,
    PARTIAL_PREFILL,
    TENANTS,
    Chunk,
    LastChunk,
    parse_tenants,
)
from trimtab_protocol.chat.openai_backend import completion_request, tokenize_request
from trimtab_protocol.event_loop import start_service
from trimtab_protocol.extensions import OPERATING_POINT, parse_task_accuracies, parse_tasks
from trimtab_protocol.http_client import (
    ConnectionLost,
    ConnectionPool,
    HttpConnection,
    PeerIdentityError,
    Reply,
    Tls,
    request_head,
)
from trimtab_protocol.sanitize import printable
from trimtab_router.scheduling.replica_slots import (
    BatchFailed,
    BatchOutcome,
    NotReady,
    Rejected,
    ReplicaLost,
    ReplicaSlots,
)
from trimtab_router.transport.batch_codec import BatchRequest, encode_binary, encode_json
from trimtab_router.transport.engine_load import parse_engine_load
from trimtab_router.transport.stream_client import (
    BACKEND_IDLE_SECONDS,
    CLIENT_ERROR_STATUSES,
    IDLE_SECONDS,
    NOT_READY_STATUSES,
    StreamClient,
    StreamRequest,
    openai_stream_request,
)

log = logging.getLogger(__name__)

PROBE_INTERVAL_SECONDS = 1.0
PROBE_TIMEOUT_SECONDS = 1.5
LOAD_SECONDS = 1.0  # time limit of reading a third-party engine's metrics
FETCH_SECONDS = 0.5  # time limit of asking a replica for a stored embedding before the image is encoded again
FIRST_BACKOFF_SECONDS = 0.05
MAX_PROBE_BYTES = 2**20
MAX_CACHED_PATHS = MAX_CACHED_HEADS = 256
MAX_TOKEN_BYTES = 2**22  # of a prompt's token numbers in JSON
MAX_INLINE_BYTES = 2**15  # of a chat that is rewritten on the event loop, in less than a millisecond
JSON_MULTIPLE = 16  # maximum size of a tensor in JSON, as a multiple of its binary size
BINARY_EXTENSION = "binary_tensor_data"
_PROBED = ("variants", "model_names", "ready_path")  # endpoint fields that affect the probe


ReplicaResponse = InferResponse | ReplicaLost | NotReady | Rejected | BatchFailed
OnResponse = Callable[[ReplicaResponse | Exception], None]


@lru_cache(MAX_CACHED_HEADS)
def _batch_head(path: str, address: str, content_length: int, **headers: str) -> bytes:
    return request_head("POST", path, address, headers, content_length)


_model_path = lru_cache(MAX_CACHED_PATHS)(lambda model, action: f"/v2/models/{quote(model, safe='')}/{action}")


class ReplicaClient:
    """One model server: its connections and readiness.

    `generates`: the stage generates, so that the model is asked for the longest prompt that it accepts, and whether it
    starts before all images are encoded. `tasked`: requests may name tasks, so that it is asked for their indices.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        on_change: Callable[[], None],
        *,
        tls: Tls = lambda: None,
        generates: bool = False,
        tasked: bool = False,
    ) -> None:
        self.endpoint = endpoint
        self.identity_error = ""  # why the replica's TLS identity is rejected, empty if it is not
        self.slots = ReplicaSlots(endpoint.name)  # the scheduler's view of the replica
        self._generates = generates
        self._reports_tasks = tasked and not endpoint.model_names
        self._request_numbers = count(1)
        self._latest_response: dict[str, int] = {}
        self._inflight = 0
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._last_response_at = -inf
        self._on_change = on_change
        self._ready: frozenset[str] = frozenset()
        self._accepts_binary = True
        self._probe: HttpConnection | None = None
        self._unready = asyncio.Event()
        self._stale = asyncio.Event()
        self._retired: asyncio.Event | None = None
        host, _, port = endpoint.address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._tls = tls = _TLS.get(endpoint.tls, tls)
        self._connections = ConnectionPool(self._host, self._port, tls)
        self._headers = _authorization(endpoint.api_key_env)
        idle_seconds = BACKEND_IDLE_SECONDS if self.chats else IDLE_SECONDS
        self._streams = StreamClient(
            endpoint.name, endpoint.address, tls, idle_seconds=idle_seconds, headers=self._headers
        )
        self._kind = ENGINES.get(endpoint.engine or "", UNKNOWN_ENGINE)
        self.has_completed = False  # whether it has served: an engine may compile for its first requests
        self._watcher = start_service(f"watch of {endpoint.name}", self._watch)

    @property
    def name(self) -> str:
        return self.endpoint.name

    @property
    def chats(self) -> bool:
        return self.endpoint.protocol == "OpenAI"

    def counts(self, *, images: bool) -> bool:
        """Return whether a third-party engine counts the tokens of chats with or without images."""
        return bool(self._kind.render_path if images else self._kind.tokenize_path)

    def update(self, endpoint: Endpoint) -> None:
        previous, self.endpoint = self.endpoint, endpoint
        if any(getattr(previous, field) != getattr(endpoint, field) for field in _PROBED):
            self._set_ready(self._ready & frozenset(endpoint.variants))  # variants it still has stay in service
            self._stale.set()
        self._offer()

    def acquire(self) -> None:
        self._inflight += 1

    def release(self) -> None:
        self._inflight -= 1
        if self._retired is not None and not self._inflight:
            self._retired.set()

    async def retire(self) -> None:
        """Close once the batches in flight have ended. No more batches may be sent."""
        self._retired = asyncio.Event()
        if self._inflight:
            await self._retired.wait()
        await self.close()

    def mark_unready(self) -> None:
        self._unready.set()
        self._set_ready(frozenset())

    def infer(self, batch: BatchRequest, on_response: OnResponse) -> None:
        """Send a batch; `on_response` is called once, later, and must not raise."""
        body, headers = encode_binary(batch) if self._accepts_binary else encode_json(batch)
        path = self._path(batch.variant, "infer")
        headers |= self._headers
        create_head = _batch_head.__wrapped__ if batch.headers else _batch_head  # batches without traces repeat theirs
        head = create_head(path, self.endpoint.address, sum(map(len, body)), **headers)
        deadline = self._loop.time() + batch.timeout_seconds
        connection = self._connections.idle()
        if connection is not None:
            self._send(connection, head, body, batch, deadline, on_response)
            return
        task = self._loop.create_task(self._open_and_send(head, body, batch, deadline, on_response))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open_and_send(
        self, head: bytes, body: list[Buffer], batch: BatchRequest, deadline: float, on_response: OnResponse
    ) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                connection = await self._connections.open()
            self._send(connection, head, body, batch, deadline, on_response)
        except Exception as error:  # noqa: BLE001 - becomes the outcome of the batch
            on_response(self._lost(batch, error, delivered=False) or error)

    def _send(
        self,
        connection: HttpConnection,
        head: bytes,
        body: list[Buffer],
        batch: BatchRequest,
        deadline: float,
        on_response: OnResponse,
    ) -> None:
        max_bytes, on_end = self._max_response_bytes(batch), partial(self._on_reply, connection, batch, on_response)
        connection.start(head, body, on_end, max_body_bytes=max_bytes, deadline=deadline)

    def _on_reply(
        self, connection: HttpConnection, batch: BatchRequest, on_response: OnResponse, reply: Reply | Exception
    ) -> None:
        try:
            response = self._receive(connection, batch, reply)
        except Exception as error:  # noqa: BLE001 - becomes the outcome of the batch
            on_response(error)
        else:
            on_response(response)

    def _lost(self, batch: BatchRequest, error: Exception, *, delivered: bool) -> ReplicaLost | None:
        """The outcome of a batch if an error means that its replica is lost."""
        if isinstance(error, TimeoutError):
            message = f"{self.name} did not respond within {batch.timeout_seconds:.1f} s"
            return ReplicaLost(message, delivered=delivered)
        if isinstance(error, ConnectionLost):
            return ReplicaLost(f"{self.name}: {error}", delivered=delivered, disconnected=True)
        return None

    def _receive(
        self, connection: HttpConnection, batch: BatchRequest, reply: Reply | Exception
    ) -> ReplicaResponse | Exception:
        if isinstance(reply, Exception):
            return self._lost(batch, reply, delivered=True) or reply
        self._last_response_at = self._loop.time()
        response = self._read(batch, reply)
        if isinstance(response, ReplicaLost) or (reply.status == 200 and not isinstance(response, InferResponse)):
            connection.close()  # its next response may belong to another batch
        else:
            self._connections.give_back(connection)
        return response

    async def generate(
        self, batch: BatchRequest, gap_seconds: float, on_chunk: Callable[[Chunk | LastChunk], None], *, merges: bool
    ) -> BatchOutcome:
        try:
            request = await self._stream_request(batch)
        except ProtocolError as error:
            return Rejected(printable(str(error)))
        return await self._streams.generate(
            request,
            point=str(batch.parameters[OPERATING_POINT]),
            begin_seconds=batch.timeout_seconds,
            gap_seconds=gap_seconds,
            max_bytes=batch.max_response_bytes,
            merges=merges,
            on_chunk=on_chunk,
        )

    async def _stream_request(self, batch: BatchRequest) -> StreamRequest:
        """Request for one row. Raises ProtocolError if an OpenAI backend cannot serve it."""
        if self.chats:
            (tenant,) = parse_tenants(batch.parameters.get(TENANTS), 1)
            arguments = self._kind, self._model_name(batch), tenant or batch.id, batch
            if _content_bytes(batch) <= MAX_INLINE_BYTES:
                return openai_stream_request(*arguments)
            return await asyncio.to_thread(openai_stream_request, *arguments)
        if batch.forwarded is not None:
            raise ProtocolError(f"no third-party engine serves {batch.forwarded.route.path} now; send a chat")
        body, headers = encode_binary(batch)
        return StreamRequest(self._path(batch.variant, "generate_stream"), b"".join(body), headers)

    async def count_tokens(self, batch: BatchRequest) -> tuple[int, bytes]:
        """Status and body of a row's token count, status 0 without a response. Raises ProtocolError."""
        if self.chats:
            row = {tensor.name: tensor.array for (tensor,) in batch.inputs}
            headers = {"Content-Type": rest.JSON_CONTENT_TYPE, "x-request-id": batch.id}
            if IMAGES in row:
                render = partial(completion_request, cache_salt=batch.id, kind=self._kind)
                name, options = self._model_name(batch), batch.processor_kwargs
                body = await asyncio.to_thread(render, name, row, processor_kwargs=options)
                return await self._streams.post(
                    self._kind.render_path, body, headers, batch.timeout_seconds, MAX_TOKEN_BYTES, until=b"]"
                )
            body = tokenize_request(self._model_name(batch), row)
            return await self._streams.post(self._kind.tokenize_path, body, headers, batch.timeout_seconds)
        parts, headers = encode_binary(batch)
        path = self._path(batch.variant, "count")
        return await self._streams.post(path, b"".join(parts), headers, batch.timeout_seconds)

    def _model_name(self, batch: BatchRequest) -> str:
        return batch.adapter or self.endpoint.model_names.get(batch.variant, batch.variant)

    def embedding_url(self, variant: str, name: str) -> str:
        scheme = "http" if self._tls() is None else "https"
        return f"{scheme}://{self.endpoint.address}{self._path(variant, 'embeddings')}/{quote(name, safe='')}"

    async def send_images(self, variant: str, request_id: str, body: bytes, seconds: float) -> bool:
        path = self._path(variant, f"references/{quote(request_id, safe='')}")
        status, _ = await self._streams.post(path, body, {"Content-Type": rest.JSON_CONTENT_TYPE}, seconds)
        return status == 200

    async def share_embedding(self, url: str, stored_name: str) -> bool:
        """Ask the replica to store an embedding once more under this URL. Returns whether it will."""
        body, headers = ShareRequest(of=stored_name).json_bytes(), {"Content-Type": rest.JSON_CONTENT_TYPE}
        status, _ = await self._streams.post(urlsplit(url).path, body, headers, PROBE_TIMEOUT_SECONDS)
        return status == 200

    async def fetch_embedding(self, url: str, body: bytes) -> EncodedImage | None:
        """Ask the replica to store a cached embedding under this URL, None if it has none. Raises ProtocolError."""
        headers = {"Content-Type": rest.JSON_CONTENT_TYPE}
        status, body_read = await self._streams.post(urlsplit(url).path, body, headers, FETCH_SECONDS)
        return parse_encoded_image(body_read) if status == 200 else None

    async def delete_embedding(self, url: str) -> None:
        """Ask the replica to delete an embedding. If the request fails, the embedding expires."""
        await self._streams.delete(url, PROBE_TIMEOUT_SECONDS)

    async def model_metadata(self, variant: str) -> dict[str, Any]:
        if self.chats:
            return {}
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
                connection = await self._connections.take()
                parameters = await self._fetch_metadata(connection, variant)
        except (ConnectionLost, TimeoutError):
            return {}
        self._connections.give_back(connection)
        return parameters or {}

    async def _fetch_metadata(self, connection: HttpConnection, variant: str) -> dict[str, Any] | None:
        """Parameters of a model's metadata over a connection, None without a response. Its tasks are stored.

        Of two concurrent responses, the one to the later request counts: the other may be older.
        """
        request_number = next(self._request_numbers)
        reply = await self._get(connection, self._path(variant, "").rstrip("/"))
        if reply.status != 200:
            return None
        parameters = _json_object(reply).get("parameters")
        metadata = parameters if isinstance(parameters, dict) else {}
        if self._reports_tasks and request_number > self._latest_response.get(variant, 0):
            self._latest_response[variant] = request_number
            self.slots.tasks[variant] = tuple(parse_tasks(metadata))
            self.slots.task_accuracies[variant] = parse_task_accuracies(metadata)
        return metadata

    def _max_response_bytes(self, batch: BatchRequest) -> int:
        """Bound on a response: a third-party server may send tensors as JSON."""
        return batch.max_response_bytes * (JSON_MULTIPLE if self.endpoint.model_names else 1)

    def _read(self, batch: BatchRequest, reply: Reply) -> ReplicaResponse:
        if reply.status != 200:
            error = _json_object(reply)
            message = printable(str(error.get("error", f"HTTP status {reply.status}")))
            return self._check_batch_id(batch, str(error.get("id", "")), required=False) or self._error_outcome(
                reply, message
            )
        try:
            response = rest.decode_response(reply.body, reply.headers.get(rest.HEADER_LENGTH.lower()))
        except ProtocolError as error:
            return BatchFailed(f"model server {self.name}: {error}")
        return self._check_batch_id(batch, response.id, required=not self.endpoint.model_names) or response

    def _error_outcome(self, reply: Reply, message: str) -> NotReady | Rejected | BatchFailed:
        if reply.status in NOT_READY_STATUSES:
            return NotReady()
        if reply.status in CLIENT_ERROR_STATUSES:
            return Rejected(message)
        return BatchFailed(f"model server {self.name} answered {reply.status}: {message}")

    def _check_batch_id(self, batch: BatchRequest, received: str, *, required: bool) -> ReplicaLost | None:
        """Outcome if the response belongs to another batch. Third-party servers may omit the id."""
        if received != batch.id and (received or required):
            return ReplicaLost(f"{self.name} answered {printable(received, 64)!r} to batch {batch.id!r}")
        return None

    async def close(self) -> None:
        self._watcher.cancel()
        await asyncio.gather(self._watcher, return_exceptions=True)
        self._connections.close()
        await self._streams.close()
        if self._probe is not None:
            self._probe.close()

    async def _watch(self) -> None:
        pauses = backoff(FIRST_BACKOFF_SECONDS, PROBE_INTERVAL_SECONDS)
        while True:
            pause_seconds = next(pauses)
            self._unready.clear()
            self._stale.clear()
            ready = await self._probe_variants()
            if not self._unready.is_set():  # the probe may be older than the failure
                self._set_ready(ready & frozenset(self.endpoint.variants))
            if ready and self._kind.load is not None:
                text = await self._streams.get(self._kind.load.path, LOAD_SECONDS, MAX_PROBE_BYTES)
                self.slots.engine_load = parse_engine_load(text, self._kind.load)
            unready = await self._pause(PROBE_INTERVAL_SECONDS if ready else pause_seconds)
            if unready:  # a replica that fails although its probe succeeds is not probed again at once
                await asyncio.sleep(pause_seconds)
            if ready and not unready:
                pauses = backoff(FIRST_BACKOFF_SECONDS, PROBE_INTERVAL_SECONDS)

    def _set_ready(self, ready: frozenset[str]) -> None:
        if ready != self._ready:
            log.info("replica %s: ready for %s", self.name, ", ".join(sorted(ready)) or "nothing")
            self._ready = ready
            self._offer()
            self._on_change()

    def _offer(self) -> None:
        self.slots.set_ready_variants(frozenset() if self.endpoint.draining else self._ready)

    async def _pause(self, seconds: float) -> bool:
        """Wait at most this long for the replica to be lost, unready or updated. Returns whether it is unready."""
        events = [asyncio.ensure_future(event.wait()) for event in (self._unready, self._stale)]
        watched: list[asyncio.Future[Any]] = [*events, *([self._probe.closed] if self._probe else [])]
        try:
            await asyncio.wait(watched, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for event in events:
                event.cancel()
        if self._probe is not None and self._probe.closed.done():
            self._probe = None
            self.mark_unready()
        return self._unready.is_set()

    async def _probe_variants(self) -> frozenset[str]:
        started_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
                probe = await self._probe_connection()
                readiness = {variant: await self._ask(probe, variant) for variant in self.endpoint.variants}
                for variant in [name for name, ready in readiness.items() if ready] if self._reports_tasks else ():
                    await self._fetch_metadata(probe, variant)
                new = [variant for variant, ready in readiness.items() if ready and variant not in self._ready]
                for variant in new if self._generates else ():
                    await self._fetch_chat_facts(probe, variant)
        except (ConnectionLost, TimeoutError) as error:
            log.debug("replica %s: probe failed: %s", self.name, error)
            self._set_identity_error(str(error) if isinstance(error, PeerIdentityError) else "")
            if self._probe is not None:
                self._probe.close()
                self._probe = None
            # A replica that answers batches is ready even if it is too busy to answer the probe.
            return (
                self._ready if isinstance(error, TimeoutError) and self._last_response_at > started_at else frozenset()
            )
        self._set_identity_error("")
        return frozenset(variant for variant, ready in readiness.items() if ready)

    async def _probe_connection(self) -> HttpConnection:
        tls = self._tls()
        if self._probe is not None and self._probe.usable and self._probe.tls is tls:
            return self._probe
        if self._probe is not None:
            self._probe.close()
        self._probe = await HttpConnection.open(self._host, self._port, tls)
        if not self.chats:
            self._accepts_binary = not self.endpoint.model_names or await self._offers_binary(self._probe)
        return self._probe

    def _set_identity_error(self, reason: str) -> None:
        if reason and reason != self.identity_error:
            log.warning("replica %s rejected: %s", self.name, reason)
        self.identity_error = reason

    async def _ask(self, connection: HttpConnection, variant: str) -> bool:
        """Whether the replica is ready, or would be if its event loop did not lag."""
        reply = await self._get(connection, self.endpoint.ready_path or self._path(variant, "ready"))
        is_own = not self.endpoint.model_names and not self.chats
        overload = printable(str(_json_object(reply).get("reason", ""))) if is_own and reply.status == 503 else ""
        if overload != self.slots.overload:
            self.slots.overload = overload
            self._on_change()
        return reply.status == 200 or bool(overload)

    async def _fetch_chat_facts(self, connection: HttpConnection, variant: str) -> None:
        if self.chats:
            model = self.endpoint.model_names.get(variant, variant)
            models = _json_object(await self._get(connection, "/v1/models")).get("data")
            found = [entry for entry in models if isinstance(entry, dict)] if isinstance(models, list) else []
            max_tokens: object = next((entry.get("max_model_len") for entry in found if entry.get("id") == model), None)
        else:
            facts = await self._fetch_metadata(connection, variant) or {}
            max_tokens = facts.get(MAX_PROMPT_TOKENS)
            self.slots.partial_prefill -= {variant}
            self.slots.partial_prefill |= {variant} if facts.get(PARTIAL_PREFILL) is True else frozenset()
        self.slots.max_prompt_tokens.pop(variant, None)
        if isinstance(max_tokens, int):
            self.slots.max_prompt_tokens[variant] = max_tokens

    async def _offers_binary(self, connection: HttpConnection) -> bool:
        reply = await self._get(connection, "/v2")
        try:
            return reply.status == 200 and BINARY_EXTENSION in json.loads(bytes(reply.body))["extensions"]
        except (ValueError, KeyError, TypeError):
            return False

    async def _get(self, connection: HttpConnection, path: str) -> Reply:
        head = request_head("GET", path, self.endpoint.address, self._headers, 0)
        return await connection.exchange(head, max_body_bytes=MAX_PROBE_BYTES)

    def _path(self, variant: str, action: str) -> str:
        return _model_path(self.endpoint.model_names.get(variant, variant), action)


_TLS: Mapping[str, Tls] = {"Public": lru_cache(1)(ssl.create_default_context), "Off": lambda: None}


def _content_bytes(batch: BatchRequest) -> int:
    """Return the bytes of a row's strings and files."""
    return sum(
        [len(element) for (tensor,) in batch.inputs if tensor.array.dtype.kind == "O" for element in tensor.array.flat]
    )


def _authorization(variable: str | None) -> dict[str, str]:
    key = os.environ.get(variable, "") if variable else ""
    if variable and not key:
        log.warning("environment variable %s is not set; the server gets no key", variable)
    return {"Authorization": f"Bearer {key}"} if key else {}


def _json_object(reply: Reply) -> dict[str, Any]:
    return _object(bytes(reply.body))


def _object(body: bytes) -> dict[str, Any]:
    try:
        parameters = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return parameters if isinstance(parameters, dict) else {}
