"""`HttpTransport`: sends the batches of one stage to its replicas over HTTP and reports their outcomes."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import count
from operator import attrgetter
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from trimtab_pipelines.endpoints import Endpoint
from trimtab_pipelines.stages import CHAT_IMAGE_INDEX, EMBEDDINGS_INPUT, Stage
from trimtab_pipelines.tasks import TASK_INPUT
from trimtab_protocol import InferResponse, Tensor
from trimtab_protocol.chat.internal_wire import (
    OPTIONS,
    STORE_AS,
    TENANTS,
    bytes_tensor,
    dump_tenants,
    embedding_id,
    group_embedding_urls,
    options_with_deadline,
)
from trimtab_protocol.errors import ProtocolError
from trimtab_protocol.extensions import COMPUTE_SECONDS, OPERATING_POINT, WAITED_SECONDS
from trimtab_protocol.http_client import Tls
from trimtab_protocol.tensors import Array
from trimtab_router.execution import chat_images
from trimtab_router.execution.chat_images import arrived_images_body
from trimtab_router.execution.task_registry import accepts_task_names, task_indices_at
from trimtab_router.refusal import failure
from trimtab_router.scheduling.interfaces import OnChunk
from trimtab_router.scheduling.replica_slots import (
    Batch,
    BatchFailed,
    BatchOutcome,
    Cancelled,
    Completed,
    NotReady,
    ReplicaLost,
    ReplicaSlots,
    StreamCut,
)
from trimtab_router.scheduling.stage_request import RowSlice
from trimtab_router.transport.batch_codec import BatchRequest, MalformedResponse, scatter
from trimtab_router.transport.batch_codec import max_response_bytes as bound_response
from trimtab_router.transport.replica_client import ReplicaClient, ReplicaResponse


class EmbeddingShares:
    """Additional embeddings of one batch in flight, stored under its name and numbered after its own rows.

    `tasks` holds the requests until they are answered, whatever happens to the batch.
    """

    def __init__(self, replica: ReplicaClient, batch: Batch, name: str, tasks: set[asyncio.Task[Any]]) -> None:
        self._replica = replica
        self._batch = batch
        self._name = name
        self._tasks = tasks
        self._pending: list[tuple[int, asyncio.Task[bool]]] = []

    def share(self, row: int) -> None:
        url = self.url(self._batch.rows + len(self._pending))
        task = asyncio.get_running_loop().create_task(self._replica.share_embedding(url, embedding_id(self._name, row)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._pending.append((row, task))

    async def wait(self) -> None:
        """Wait until the replica has answered every request: until then the embeddings must not be fetched."""
        while pending := [task for _, task in self._pending if not task.done()]:
            await asyncio.wait(pending)

    def results(self, references: Array) -> Sequence[Mapping[str, Array] | None]:
        """Outputs for each additional row, None if the replica did not store it. Raises ProtocolError."""
        shared = [references[row : row + 1] if task.result() else None for row, task in self._pending]
        return [
            None
            if row_reference is None
            else {
                EMBEDDINGS_INPUT: chat_images.addressed_references(row_reference, [self.url(self._batch.rows + number)])
            }
            for number, row_reference in enumerate(shared)
        ]

    def url(self, row: int) -> str:
        return self._replica.embedding_url(self._batch.variant, embedding_id(self._name, row))


log = logging.getLogger(__name__)

_ROWS = attrgetter("rows")
HANG_FACTOR = 20.0
FIRST_BATCH_FACTOR = 10.0
ENGINE_GAP_FACTOR = 10.0
"""Third-party engines send nothing while they prefill other prompts, or recompute a preempted one."""
MAX_REQUEST_IDS = 16
_KNOWN_AT_DISPATCH = {OPTIONS, TASK_INPUT}
OnEnd = Callable[[Batch, BatchOutcome], None]
OnResult = Callable[[Mapping[str, Array] | None], None]


class HttpTransport:
    """Replicas of one stage, and the batches in flight.

    A replica that does not respond within `hang_seconds` or longer, depending on the batch, counts as lost.
    `max_response_bytes` bounds a response whose size the stage leaves open.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        datatypes: Mapping[str, str],
        hang_seconds: float,
        max_response_bytes: int,
        tls: Tls = lambda: None,
    ) -> None:
        self.replicas: dict[str, ReplicaClient] = {}
        self._stage = stage
        self._encodes, self._generates, self._serves_chats = stage.encodes, stage.generates, stage.serves_chats
        self._datatypes = {**datatypes, CHAT_IMAGE_INDEX: "INT64"} if stage.encodes else datatypes
        self._accepts_tasks = accepts_task_names(stage)
        self._excluded_inputs = {variant.name: stage.excluded_input(variant.name) for variant in stage.variants}
        self._processor_kwargs = stage.processor_kwargs
        self._adapters = {variant.name: variant.adapters for variant in stage.variants if variant.adapters}
        self._hang_seconds = hang_seconds
        self._tls = tls
        self._id_prefix = secrets.token_hex(4)
        self._batch_numbers = count(1)
        self._bound_response = cache(partial(bound_response, stage, otherwise=max_response_bytes))
        self._tasks: set[asyncio.Task[Any]] = set()
        self._generations: dict[Batch, asyncio.Task[BatchOutcome]] = {}
        self._early_requests: dict[Batch, tuple[ReplicaClient, str]] = {}
        self._failures: dict[Batch, BatchOutcome] = {}
        self._shares: dict[Batch, EmbeddingShares] = {}
        self._retiring: set[asyncio.Task[Any]] = set()

    @property
    def unauthenticated(self) -> dict[str, str]:
        return {name: replica.identity_error for name, replica in self.replicas.items() if replica.identity_error}

    def set_endpoints(self, endpoints: Iterable[Endpoint], on_change: Callable[[], None]) -> list[ReplicaSlots]:
        """Use these replicas from now on; `on_change` is called when readiness changes. Others close when idle."""
        wanted = {endpoint.name: endpoint for endpoint in endpoints}
        for name, replica in list(self.replicas.items()):
            endpoint = wanted.get(name)
            if endpoint is not None and endpoint.address == replica.endpoint.address:
                replica.update(endpoint)
            else:
                _spawn(self.replicas.pop(name).retire(), self._retiring)
        for name, endpoint in wanted.items():
            if name not in self.replicas:
                self.replicas[name] = ReplicaClient(
                    endpoint, on_change, tls=self._tls, generates=self._generates, tasked=self._accepts_tasks
                )
        return [replica.slots for replica in self.replicas.values()]

    def send(self, batch: Batch, on_end: OnEnd) -> None:
        replica = self.replicas[batch.replica.name]
        replica.acquire()
        request = self.build_request(batch)  # built now: a request cancelled before it is sent has no inputs left
        if self._encodes:
            self._shares[batch] = EmbeddingShares(replica, batch, request.id, self._tasks)
        on_response = partial(self._on_response, replica, batch, on_end)
        try:
            replica.infer(request, on_response)
        except Exception as error:  # noqa: BLE001 - fails the batch
            asyncio.get_running_loop().call_soon(on_response, error)

    def share(self, batch: Batch, row: int) -> bool:
        """Store a row of a batch in flight once more. Returns False if it is too late."""
        shares = self._shares.get(batch)
        if shares is not None:
            shares.share(row)
        return shares is not None

    def fetch(self, slot: ReplicaSlots, variant: str, row_slice: RowSlice, on_result: OnResult) -> None:
        replica = self.replicas.get(slot.name)
        if replica is not None and replica.slots is slot:
            replica.acquire()
            _spawn(self._fetch(replica, variant, row_slice, on_result), self._tasks)
        else:
            asyncio.get_running_loop().call_soon(on_result, None)

    async def _fetch(self, replica: ReplicaClient, variant: str, row_slice: RowSlice, on_result: OnResult) -> None:
        outputs: Mapping[str, Array] | None = None
        try:
            outputs = await self._fetch_stored(replica, variant, row_slice)
        except Exception:
            log.exception("stage %s: replica %s could not be asked for an image", self._stage.name, replica.name)
        finally:
            replica.release()
        on_result(outputs)

    async def _fetch_stored(
        self, replica: ReplicaClient, variant: str, row_slice: RowSlice
    ) -> Mapping[str, Array] | None:
        if not row_slice.request.identities:
            return None
        url = replica.embedding_url(variant, embedding_id(secrets.token_hex(8), 0))
        # Hashes megabytes.
        body = await asyncio.to_thread(chat_images.image_lookup, row_slice.request.identities[row_slice.start])
        encoded = await replica.fetch_embedding(url, body)
        if encoded is None:
            return None
        outputs = {EMBEDDINGS_INPUT: chat_images.embedding_reference(url, encoded)}
        if row_slice.request.closed:
            self.release(outputs[EMBEDDINGS_INPUT])
        return outputs

    def stream(self, batch: Batch, on_chunk: OnChunk, on_end: OnEnd) -> None:
        replica = self.replicas[batch.replica.name]
        replica.acquire()
        request = self.build_request(batch)
        merges = not batch.row_slices[0].request.owner.has_listener
        gap_seconds = self._hang_seconds * (ENGINE_GAP_FACTOR if replica.chats else 1.0)
        generation = replica.generate(request, gap_seconds, partial(on_chunk, batch), merges=merges)
        if batch.early_prefill:
            self._early_requests[batch] = replica, request.id
        task = self._generations[batch] = asyncio.get_running_loop().create_task(generation)
        task.add_done_callback(partial(self._on_generated, replica, batch, on_end))

    def send_images(self, batch: Batch, images: Mapping[int, bytes]) -> None:
        """Send a replica images that a row of its waits for. If that fails, the row fails."""
        if batch in self._early_requests:
            _spawn(self._send_images(batch, *self._early_requests[batch], arrived_images_body(images)), self._tasks)

    async def _send_images(self, batch: Batch, replica: ReplicaClient, request_id: str, body: bytes) -> None:
        accepted = await replica.send_images(batch.variant, request_id, body, self._hang_seconds)
        if not accepted and batch in self._generations:
            self._failures[batch] = BatchFailed(f"model server {replica.name} did not accept images")
            self._generations[batch].cancel()

    def cancel(self, batch: Batch) -> None:
        self._generations[batch].cancel()

    def _on_generated(
        self, replica: ReplicaClient, batch: Batch, on_end: OnEnd, task: asyncio.Task[BatchOutcome]
    ) -> None:
        del self._generations[batch]
        self._early_requests.pop(batch, None)
        outcome_if_cancelled = self._failures.pop(batch, Cancelled())
        if task.cancelled():
            outcome: BatchOutcome = outcome_if_cancelled
        elif (error := task.exception()) is not None:
            log.error("stage %s: a row failed", self._stage.name, exc_info=error)
            outcome = BatchFailed(f"{type(error).__name__}: {error}", retryable=False)
        else:
            outcome = task.result()
        self._settle(replica, batch, outcome, on_end)

    async def count_tokens(self, name: str, variant: str, inputs: Mapping[str, Array]) -> tuple[int, bytes]:
        """Status and body of a token count of some rows, status 0 if the replica does not respond."""
        point = self._stage.variant(variant).points[0].name
        tensors = [[Tensor(tensor, self._datatypes[tensor], array)] for tensor, array in inputs.items()]
        batch = BatchRequest(
            id=secrets.token_hex(8),
            variant=variant,
            inputs=tensors,
            parameters={OPERATING_POINT: point},
            headers={},
            timeout_seconds=self._hang_seconds,
            max_response_bytes=0,
            processor_kwargs=self._processor_kwargs.get((variant, point), {}),
        )
        return await self.replicas[name].count_tokens(batch)

    async def model_metadata(self, variant: str) -> dict[str, dict[str, Any]]:
        ready = {name: client for name, client in self.replicas.items() if variant in client.slots.ready_variants}
        metadata = await asyncio.gather(*(replica.model_metadata(variant) for replica in ready.values()))
        return dict(zip(ready, metadata, strict=True))

    async def close(self) -> None:
        await asyncio.gather(*(replica.close() for replica in self.replicas.values()), *self._retiring)

    def _on_response(
        self, replica: ReplicaClient, batch: Batch, on_end: OnEnd, response: ReplicaResponse | Exception
    ) -> None:
        if self._encodes and isinstance(response, InferResponse):
            _spawn(self._settle_encoded(replica, batch, on_end, response), self._tasks)
            return
        self._shares.pop(batch, None)
        try:
            outcome = self._outcome(replica, batch, response)
        except Exception as error:  # noqa: BLE001 - logged there
            outcome = self._failure(batch, error)
        self._settle(replica, batch, outcome, on_end)

    async def _settle_encoded(
        self, replica: ReplicaClient, batch: Batch, on_end: OnEnd, response: InferResponse
    ) -> None:
        try:
            outcome = self._outcome(replica, batch, response)
            if isinstance(outcome, Completed):
                outcome = await self._address_embeddings(batch, outcome)
        except ProtocolError as error:
            outcome = BatchFailed(f"model server {replica.name}: {error}")
        except Exception as error:  # noqa: BLE001 - logged there
            outcome = self._failure(batch, error)
        finally:
            self._shares.pop(batch, None)
        self._settle(replica, batch, outcome, on_end)

    def _failure(self, batch: Batch, error: Exception) -> BatchFailed:
        name = self._stage.name
        log.error("stage %s: a batch of %d slices failed", name, len(batch.row_slices), exc_info=error)
        return BatchFailed(f"{type(error).__name__}: {error}", retryable=False)

    def _settle(self, replica: ReplicaClient, batch: Batch, outcome: BatchOutcome, on_end: OnEnd) -> None:
        name = self._stage.name
        replica.release()
        match outcome:
            case Completed():
                replica.has_completed = True
            case ReplicaLost() | NotReady() | StreamCut(lost=True):
                replica.mark_unready()
        try:
            on_end(batch, outcome)
        except Exception:
            log.exception("stage %s: handling the outcome of a batch of %d slices failed", name, len(batch.row_slices))
            for owner in (row_slice.request.owner for row_slice in batch.row_slices):
                message = f"stage {name}: its model server failed"
                owner.on_refused(failure("ModelServerError", message, owner.request_id, stage=name))

    def _outcome(self, replica: ReplicaClient, batch: Batch, response: ReplicaResponse | Exception) -> BatchOutcome:
        if isinstance(response, Exception):
            return self._failure(batch, response)
        if not isinstance(response, InferResponse):
            return response
        try:
            outputs = scatter(self._stage, response.outputs, list(map(_ROWS, batch.row_slices)))
        except MalformedResponse as error:
            return BatchFailed(f"model server {replica.name}: {error}")
        parameters = response.parameters
        computed, waited = parameters.get(COMPUTE_SECONDS), parameters.get(WAITED_SECONDS)
        return Completed(
            outputs=outputs,
            point=str(parameters.get(OPERATING_POINT, batch.point.name)),
            compute_seconds=computed if isinstance(computed, float) else None,
            replica_queue_seconds=waited if isinstance(waited, float) else None,
        )

    def release(self, references: Array) -> None:
        for url in group_embedding_urls(chat_images.embedding_urls(references)):
            address = urlsplit(url).netloc
            replica = next((client for client in self.replicas.values() if client.endpoint.address == address), None)
            if replica is not None:
                _spawn(replica.delete_embedding(url), self._tasks)

    async def _address_embeddings(self, batch: Batch, completed: Completed) -> Completed:
        """Replace embeddings by references with URLs; release those of closed requests."""
        shares = self._shares[batch]
        await shares.wait()
        del self._shares[batch]
        shared = shares.results(np.concatenate([part[EMBEDDINGS_INPUT] for part in completed.outputs]))
        outputs, row = list[Mapping[str, Array]](), 0
        for row_slice, part in zip(batch.row_slices, completed.outputs, strict=True):
            urls = [shares.url(row + offset) for offset in range(row_slice.rows)]
            references = chat_images.addressed_references(part[EMBEDDINGS_INPUT], urls)
            outputs.append({**part, EMBEDDINGS_INPUT: references})
            row += row_slice.rows
        for row_slice, result in zip([*batch.row_slices, *batch.joined_rows], [*outputs, *shared], strict=True):
            if row_slice.request.closed and result is not None:
                self.release(result[EMBEDDINGS_INPUT])
        return replace(completed, outputs=outputs, shared_outputs=shared)

    def build_request(self, batch: Batch) -> BatchRequest:
        slices, point, excluded = batch.row_slices, batch.point, self._excluded_inputs[batch.variant]
        predicted_seconds = point.seconds(batch.rows)
        inputs: list[list[Tensor]] = []
        for name in slices[0].request.inputs:
            if name != excluded and (point.inputs is None or name in point.inputs):
                datatype, known_at_dispatch = self._datatypes[name], name in _KNOWN_AT_DISPATCH
                parts: list[Tensor] = []
                for row_slice in slices:
                    rows = row_slice.request.inputs[name]
                    if known_at_dispatch or row_slice.rows != len(rows):
                        rows = self._rows(batch, row_slice, name)
                    parts.append(Tensor(name, datatype, rows))
                inputs.append(parts)
        compiles = False
        if self._serves_chats:
            predicted_seconds += max(batch.prefill_seconds, 0.0)
            replica = self.replicas.get(batch.replica.name)
            compiles = replica is not None and replica.chats and not replica.has_completed
        warm = predicted_seconds and not compiles
        min_seconds = self._hang_seconds if warm else FIRST_BATCH_FACTOR * self._hang_seconds
        name = secrets.token_hex(8) if self._serves_chats else f"{self._id_prefix}{next(self._batch_numbers):x}"
        parameters: dict[str, Any] = {OPERATING_POINT: point.name}
        if self._serves_chats:
            tenants = [row_slice.request.tenant for row_slice in slices for _ in range(row_slice.rows)]
            parameters[TENANTS] = dump_tenants(tenants)
        if self._encodes:
            parameters[STORE_AS] = name
        return BatchRequest(
            id=name,
            variant=batch.variant,
            inputs=inputs,
            parameters=parameters,
            headers=_trace_headers(slices),
            timeout_seconds=max(HANG_FACTOR * predicted_seconds, min_seconds)
            + (_image_wait_seconds(batch) if batch.early_prefill else 0.0),
            max_response_bytes=self._bound_response(batch.rows),
            forwarded=slices[0].request.owner.forwarded if self._generates else None,
            processor_kwargs=self._processor_kwargs.get((batch.variant, point.name), {}),
            adapter=self._adapter(batch) if self._adapters else "",
        )

    def _adapter(self, batch: Batch) -> str:
        return self._adapters[batch.variant].get(batch.row_slices[0].request.options.task, "")

    def _rows(self, batch: Batch, row_slice: RowSlice, name: str) -> Array:
        """Rows of an input, with what only dispatch knows: the time left of chats, and the indices of tasks."""
        if name == OPTIONS and self._generates:
            return rows_with_deadline(batch.dispatched_at, row_slice, name)
        rows = row_slice.array(name)
        return _rows_with_task(batch, row_slice, rows) if name == TASK_INPUT and row_slice.request.task else rows


def _spawn(coroutine: Coroutine[Any, Any, None], tasks: set[asyncio.Task[Any]]) -> None:
    task = asyncio.get_running_loop().create_task(coroutine)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def rows_with_deadline(dispatched_at: float, row_slice: RowSlice, name: str) -> Array:
    """Options of chats, with the time left until the response must start."""
    left_seconds = row_slice.request.due_at - dispatched_at
    return bytes_tensor([options_with_deadline(bytes(row), left_seconds) for row in row_slice.array(name)])


def _rows_with_task(batch: Batch, row_slice: RowSlice, rows: Array) -> Array:
    """Index of a named task at the replica of the batch, for these rows of the input for tasks."""
    return task_indices_at(row_slice.request.task, batch.replica.tasks.get(batch.variant, ()), rows)


def _image_wait_seconds(batch: Batch) -> float:
    """Time that a batch may wait at its replica for missing images: until its request ends anyway."""
    return max(batch.row_slices[0].request.deadline - batch.dispatched_at, 0.0)


def _trace_headers(slices: Sequence[RowSlice]) -> dict[str, str]:
    """Trace headers for the model server: the trace of the first member, and the request ids of all."""
    headers: dict[str, str] = {}
    trace_parent = ""
    request_ids: list[str] = []
    for row_slice in slices:
        owner = row_slice.request.owner
        trace_parent = trace_parent or owner.trace_parent
        if owner.request_id:
            request_ids.append(owner.request_id)
    if trace_parent:
        headers["traceparent"] = trace_parent
    if request_ids:
        headers["x-request-id"] = ",".join(request_ids[:MAX_REQUEST_IDS])
    return headers
