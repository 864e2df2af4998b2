"""Shell: carries the batches of one stage to its replicas over HTTP, and says how each ended."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from trimtab_pipelines.endpoints import Endpoint
from trimtab_pipelines.stages import CHAT_IMAGE_INDEX, EMBEDDINGS_INPUT, Stage
from trimtab_pipelines.tasks import TASK_INPUT
from trimtab_protocol import InferResponse, Parameters, Tensor
from trimtab_protocol.chat.internal_wire import KEEP, OPTIONS, embedding_id, one_address, options_with_deadline, texts
from trimtab_protocol.errors import ProtocolError
from trimtab_protocol.extensions import COMPUTE_SECONDS, OPERATING_POINT, WAITED_SECONDS
from trimtab_protocol.http_client import Tls
from trimtab_protocol.tensors import Array
from trimtab_router.refusal import failure
from trimtab_router.request import image_fanout
from trimtab_router.request.partial_images import numbered
from trimtab_router.request.task_names import accepts_task_names, task_indices_at
from trimtab_router.scheduling.batch_outcomes import (
    BatchFailed,
    Cancelled,
    Completed,
    Ending,
    NotReady,
    ReplicaLost,
    StreamCut,
)
from trimtab_router.scheduling.interfaces import Wrote
from trimtab_router.scheduling.replica_slots import Batch, ReplicaSlots
from trimtab_router.scheduling.stage_request import RowSlice
from trimtab_router.transport.batch_request import BatchRequest
from trimtab_router.transport.embedding_shares import EmbeddingShares
from trimtab_router.transport.replica_client import ReplicaClient
from trimtab_router.transport.scatter import MalformedResponse, most_answer_bytes, scatter

log = logging.getLogger(__name__)

HANG_FACTOR = 20.0
FIRST_BATCH_FACTOR = 10.0
MAX_REQUEST_IDS = 16


class HttpTransport:
    """The replicas of one stage, and the batches on their way.

    Args:
        stage: the stage.
        datatypes: the datatype of each of its inputs.
        hang_seconds: the least time after which a replica that does not answer counts as lost; the first batch, of
            which nothing is known yet, has ten times as long.
        max_answer_bytes: of an answer whose size the stage leaves open.
        tls: what connections to replicas are secured with.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        datatypes: Mapping[str, str],
        hang_seconds: float,
        max_answer_bytes: int,
        tls: Tls = lambda: None,
    ) -> None:
        self.replicas: dict[str, ReplicaClient] = {}
        self._stage = stage
        self._datatypes = {**datatypes, CHAT_IMAGE_INDEX: "INT64"} if stage.encodes else datatypes
        self._pulls = stage.generates and any(read.name == EMBEDDINGS_INPUT for read in stage.inputs)
        self._tasked = accepts_task_names(stage)
        self._left_out = {variant.name: stage.excluded_input(variant.name) for variant in stage.variants}
        self._hang_seconds = hang_seconds
        self._max_answer_bytes = max_answer_bytes
        self._tls = tls
        self._under_way: set[asyncio.Task[Any]] = set()
        self._writing: dict[Batch, asyncio.Task[Ending]] = {}
        self._asked: dict[Batch, tuple[ReplicaClient, str]] = {}
        self._failing: dict[Batch, Ending] = {}
        self._shares: dict[Batch, EmbeddingShares] = {}
        self._retiring: set[asyncio.Task[Any]] = set()

    @property
    def refused(self) -> dict[str, str]:
        """Why replicas get no work that are not who they must be, by name."""
        return {name: replica.refused for name, replica in self.replicas.items() if replica.refused}

    def follow(self, endpoints: Iterable[Endpoint], on_change: Callable[[], None]) -> list[ReplicaSlots]:
        """Use these replicas from now on, and call `on_change` whenever one's readiness changed; returns their slots.

        Those no longer named finish what they hold and are left.
        """
        wanted = {endpoint.name: endpoint for endpoint in endpoints}
        for name, replica in list(self.replicas.items()):
            endpoint = wanted.get(name)
            if endpoint is not None and endpoint.address == replica.endpoint.address:
                replica.update(endpoint)
            else:
                _start(self.replicas.pop(name).retire(), self._retiring)
        for name, endpoint in wanted.items():
            if name not in self.replicas:
                self.replicas[name] = ReplicaClient(
                    endpoint, on_change, tls=self._tls, writes=self._pulls, tasked=self._tasked
                )
        return [replica.slot for replica in self.replicas.values()]

    def carry(self, parcel: Batch, ended: Callable[[Batch, Ending], None]) -> None:
        """Take a batch to its replica."""
        replica = self.replicas[parcel.slot.name]
        replica.hold()
        request = self._request(parcel)  # now: of who leaves before it is sent nothing would be there
        if self._stage.encodes:
            self._shares[parcel] = EmbeddingShares(replica, parcel, request.id, self._under_way)
        _start(self._deliver(replica, parcel, request, ended), self._under_way)

    def share(self, parcel: Batch, row: int) -> bool:
        """Have what is made of a row of a batch under way kept once more; False where it is too late."""
        shares = self._shares.get(parcel)
        if shares is not None:
            shares.share(row)
        return shares is not None

    def fetch(
        self, slot: ReplicaSlots, variant: str, piece: RowSlice, came: Callable[[Mapping[str, Array] | None], None]
    ) -> None:
        """Ask a replica whether it has what it made of an image still; one that is left meanwhile closes after that."""
        replica = self.replicas.get(slot.name)
        if replica is not None and replica.slot is slot:
            replica.hold()
            _start(self._fetch(replica, variant, piece, came), self._under_way)
        else:
            asyncio.get_running_loop().call_soon(came, None)

    async def _fetch(
        self, replica: ReplicaClient, variant: str, piece: RowSlice, came: Callable[[Mapping[str, Array] | None], None]
    ) -> None:
        found: Mapping[str, Array] | None = None
        try:
            found = await self._kept_of(replica, variant, piece)
        except Exception:
            log.exception("stage %s: replica %s could not be asked for an image", self._stage.name, replica.name)
        finally:
            replica.let_go()
        came(found)

    async def _kept_of(self, replica: ReplicaClient, variant: str, piece: RowSlice) -> Mapping[str, Array] | None:
        """What a replica has kept of a row for whoever waits for it; None where it has nothing of it."""
        if not piece.work.identities:
            return None
        url = replica.kept_at(variant, embedding_id(secrets.token_hex(8), 0))
        asked = await asyncio.to_thread(
            image_fanout.image_lookup, piece.work.identities[piece.start]
        )  # megabytes are read
        made = await replica.fetch(url, asked)
        if made is None:
            return None
        found = {EMBEDDINGS_INPUT: image_fanout.reference(url, made)}
        if piece.work.closed:
            self.forget(found[EMBEDDINGS_INPUT])
        return found

    def write(self, parcel: Batch, wrote: Wrote, ended: Callable[[Batch, Ending], None]) -> None:
        """Take a row to its replica, to be written."""
        replica = self.replicas[parcel.slot.name]
        replica.hold()
        request = self._request(parcel)
        writing = replica.write(request, self._hang_seconds, partial(wrote, parcel))
        if parcel.early:
            self._asked[parcel] = replica, request.id
        task = self._writing[parcel] = asyncio.get_running_loop().create_task(writing)
        task.add_done_callback(partial(self._written, replica, parcel, ended))

    def arrived(self, parcel: Batch, images: Mapping[int, bytes]) -> None:
        """Tell the replica of images that its row still waits for; where that fails the row does."""
        if parcel in self._asked:
            _start(self._tell(parcel, *self._asked[parcel], numbered(images)), self._under_way)

    async def _tell(self, parcel: Batch, replica: ReplicaClient, asked: str, body: bytes) -> None:
        told = await replica.arrived(parcel.variant, asked, body, self._hang_seconds)
        if not told and parcel in self._writing:
            self._failing[parcel] = BatchFailed(f"model server {replica.name} could not be told of images")
            self._writing[parcel].cancel()

    def abandon(self, parcel: Batch) -> None:
        """Close the connection on which a row is written; `ended` follows."""
        self._writing[parcel].cancel()

    def _written(
        self,
        replica: ReplicaClient,
        parcel: Batch,
        ended: Callable[[Batch, Ending], None],
        task: asyncio.Task[Ending],
    ) -> None:
        del self._writing[parcel]
        self._asked.pop(parcel, None)
        failing = self._failing.pop(parcel, Cancelled())
        if task.cancelled():
            ending: Ending = failing
        elif (error := task.exception()) is not None:
            log.error("stage %s: a row failed", self._stage.name, exc_info=error)
            ending = BatchFailed(f"{type(error).__name__}: {error}", again=False)
        else:
            ending = task.result()
        self._settle(replica, parcel, ending, ended)

    async def count(self, name: str, variant: str, inputs: Mapping[str, Array]) -> tuple[int, bytes]:
        """What some rows would take, by a replica that only counts: status and body, status 0 where it says nothing."""
        point = self._stage.variant(variant).points[0].name
        own = [[Tensor(each, self._datatypes[each], array)] for each, array in inputs.items()]
        batch = BatchRequest(
            id=secrets.token_hex(8),
            variant=variant,
            inputs=own,
            parameters={OPERATING_POINT: point},
            headers={},
            timeout_seconds=self._hang_seconds,
            most_answer_bytes=0,
        )
        return await self.replicas[name].count(batch)

    async def facts(self, variant: str) -> dict[str, dict[str, Any]]:
        """What the replicas that are ready for a variant tell of it, by their names."""
        ready = {name: each for name, each in self.replicas.items() if variant in each.slot.ready_variants}
        found = await asyncio.gather(*(replica.facts(variant) for replica in ready.values()))
        return dict(zip(ready, found, strict=True))

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(replica.close() for replica in self.replicas.values()), *self._retiring)

    async def _deliver(
        self, replica: ReplicaClient, parcel: Batch, request: BatchRequest, ended: Callable[[Batch, Ending], None]
    ) -> None:
        name = self._stage.name
        try:
            ending = await self._exchange(replica, parcel, request)
        except Exception as error:
            log.exception("stage %s: a batch of %d slices failed", name, len(parcel.batch))
            ending = BatchFailed(f"{type(error).__name__}: {error}", again=False)
        finally:
            self._shares.pop(parcel, None)
        self._settle(replica, parcel, ending, ended)

    def _settle(
        self, replica: ReplicaClient, parcel: Batch, ending: Ending, ended: Callable[[Batch, Ending], None]
    ) -> None:
        name = self._stage.name
        replica.let_go()
        if isinstance(ending, ReplicaLost | NotReady) or (isinstance(ending, StreamCut) and ending.lost):
            replica.doubt()
        try:
            ended(parcel, ending)
        except Exception:
            log.exception("stage %s: nothing could be made of a batch of %d slices", name, len(parcel.batch))
            for owner in (piece.work.owner for piece in parcel.batch):
                what = f"stage {name}: its model server failed"
                owner.work_refused(failure("ModelServerError", what, owner.request_id, stage=name))

    async def _exchange(self, replica: ReplicaClient, parcel: Batch, request: BatchRequest) -> Ending:
        answer = await replica.infer(request)
        if not isinstance(answer, InferResponse):
            return answer
        try:
            outputs = scatter(self._stage, answer.outputs, [piece.rows for piece in parcel.batch])
            shared = await self._addressed(parcel, outputs) if self._stage.encodes else ()
        except (MalformedResponse, ProtocolError) as error:
            return BatchFailed(f"model server {replica.name}: {error}")
        told = answer.parameters
        return Completed(
            outputs=outputs,
            point=str(told.get(OPERATING_POINT, parcel.point.name)),
            compute_seconds=_seconds(told, COMPUTE_SECONDS),
            waited_seconds=_seconds(told, WAITED_SECONDS),
            shared=shared,
        )

    def forget(self, references: Array) -> None:
        """Have replicas keep these images' embeddings no longer: nobody will pull them."""
        for url in one_address(image_fanout.addresses(references)):
            address = urlsplit(url).netloc
            replica = next((each for each in self.replicas.values() if each.endpoint.address == address), None)
            if replica is not None:
                _start(replica.forget(url), self._under_way)

    async def _addressed(
        self, parcel: Batch, outputs: Sequence[dict[str, Array]]
    ) -> Sequence[Mapping[str, Array] | None]:
        """Say of each image where it is pulled from, and those who ride along get theirs; who left gets none."""
        shares = self._shares[parcel]
        await shares.asked()
        del self._shares[parcel]
        shared = shares.of(np.concatenate([own[EMBEDDINGS_INPUT] for own in outputs]))
        row = 0
        for piece, own in zip(parcel.batch, outputs, strict=True):
            own[EMBEDDINGS_INPUT] = image_fanout.addressed_references(
                own[EMBEDDINGS_INPUT], [shares.url(row + each) for each in range(piece.rows)]
            )
            row += piece.rows
        for piece, found in zip([*parcel.batch, *parcel.riders], [*outputs, *shared], strict=True):
            if piece.work.closed and found is not None:
                self.forget(found[EMBEDDINGS_INPUT])
        return shared

    def _request(self, parcel: Batch) -> BatchRequest:
        batch, point, left_out = parcel.batch, parcel.point, self._left_out[parcel.variant]
        predicted_seconds = point.seconds(parcel.rows) + max(parcel.prefill_seconds, 0.0)
        rows_of = partial(_hurried, parcel.departed_at) if self._stage.generates else partial(_numbered, parcel)
        inputs = [
            [Tensor(name, self._datatypes[name], rows_of(piece, name)) for piece in batch]
            for name in batch[0].work.inputs
            if name != left_out and (point.reads is None or name in point.reads)
        ]
        least = self._hang_seconds if predicted_seconds else FIRST_BATCH_FACTOR * self._hang_seconds
        name = secrets.token_hex(8)
        return BatchRequest(
            id=name,
            variant=parcel.variant,
            inputs=inputs,
            parameters={OPERATING_POINT: point.name, KEEP: name}
            if self._stage.encodes
            else {OPERATING_POINT: point.name},
            headers=_pass_on(batch),
            timeout_seconds=max(HANG_FACTOR * predicted_seconds, least) + _still_waits_seconds(parcel),
            most_answer_bytes=most_answer_bytes(self._stage, parcel.rows, self._max_answer_bytes),
        )


def _start(doing: Coroutine[Any, Any, None], kept: set[asyncio.Task[Any]]) -> None:
    task = asyncio.get_running_loop().create_task(doing)
    kept.add(task)
    task.add_done_callback(kept.discard)


def _hurried(departed_at: float, piece: RowSlice, name: str) -> Array:
    """These rows of an input; options of chats say how soon their answers are due to begin."""
    rows, left_seconds = piece.array(name), piece.work.due_at - departed_at
    return texts([options_with_deadline(bytes(row), left_seconds) for row in rows]) if name == OPTIONS else rows


def _numbered(parcel: Batch, piece: RowSlice, name: str) -> Array:
    """These rows of an input; who named a task says that task's number at the replica that the batch goes to."""
    rows = piece.array(name)
    if name != TASK_INPUT or not piece.work.task:
        return rows
    return task_indices_at(piece.work.task, parcel.slot.tasks.get(parcel.variant, ()), rows)


def _still_waits_seconds(parcel: Batch) -> float:
    """How long a batch may wait at its replica for what it reads: until its request ends anyway."""
    return max(parcel.batch[0].work.deadline - parcel.departed_at, 0.0) if parcel.early else 0.0


def _seconds(parameters: Parameters, name: str) -> float | None:
    value = parameters.get(name)
    return value if isinstance(value, float) else None


def _pass_on(batch: Sequence[RowSlice]) -> dict[str, str]:
    """Trace headers for the model server: the first member's trace, everybody's request id."""
    headers: dict[str, str] = {}
    trace_parent = next((piece.work.owner.trace_parent for piece in batch if piece.work.owner.trace_parent), "")
    if trace_parent:
        headers["traceparent"] = trace_parent
    request_ids = [piece.work.owner.request_id for piece in batch if piece.work.owner.request_id]
    if request_ids:
        headers["x-request-id"] = ",".join(request_ids[:MAX_REQUEST_IDS])
    return headers
