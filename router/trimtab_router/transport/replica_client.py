"""Shell around the model servers: connections, health, and one batch from here to there and back.

A replica is ready for a variant once its data port says so; losing a connection, a probe that fails or an answer that
it is not ready takes that back at once, and a probe brings it back. The desk sees only its slot, so that another wire
can take the place of this one. What a model server not of ours calls its models, and whether it reads binary tensors,
is settled here too.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from itertools import count
from math import inf
from typing import Any
from urllib.parse import quote, urlsplit

from trimtab_pipelines.backoff import backoff
from trimtab_pipelines.endpoints import Endpoint
from trimtab_protocol import InferResponse, ProtocolError, rest
from trimtab_protocol.chat.embedding_refs import EncodedImage, ShareRequest, read_made
from trimtab_protocol.chat.internal_wire import READS_AHEAD, Chunk, LastChunk
from trimtab_protocol.extensions import OPERATING_POINT, task_accuracies, tasks_of
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
from trimtab_router.scheduling.batch_outcomes import BatchFailed, Ending, NotReady, Rejected, ReplicaLost
from trimtab_router.scheduling.replica_slots import ReplicaSlots
from trimtab_router.transport.batch_request import BatchRequest, as_json, encoded
from trimtab_router.transport.openai_backend import LET_IDLE_SECONDS, stream_request_for
from trimtab_router.transport.stream_client import CALLERS_FAULT, IDLE_SECONDS, NOT_READY, StreamClient, StreamRequest

log = logging.getLogger(__name__)

PROBE_INTERVAL_SECONDS = 1.0
PROBE_TIMEOUT_SECONDS = 1.5
FETCH_SECONDS = 0.5
"""How long one that made an image is asked for it, before it is encoded again."""
FIRST_BACKOFF_SECONDS = 0.05
MAX_PROBE_BYTES = 2**20
JSON_MULTIPLE = 16
"""How many times its binary size a tensor may have as JSON."""
BINARY_EXTENSION = "binary_tensor_data"
_PROBED = ("variants", "model_names", "ready_path")
"""What of an endpoint a probe asks for."""


class ReplicaClient:
    """One model server: its connections, and whether it can serve.

    Args:
        endpoint: where it is and what it says it can serve.
        on_change: called whenever its readiness changed.
        tls: what connections to it are secured with.
        writes: whether it may write answers, and so is asked whether it begins before all images are there.
        tasked: whether requests may name tasks of its models, and so it is asked which number each has.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        on_change: Callable[[], None],
        *,
        tls: Tls = lambda: None,
        writes: bool = False,
        tasked: bool = False,
    ) -> None:
        self.endpoint = endpoint
        self.refused = ""
        """Why it gets no work, where it is not who it must be."""
        self.slot = ReplicaSlots(endpoint.name)
        """What its stage's desk sees of it."""
        self._writes = writes
        self._tasked = tasked and not endpoint.model_names
        self._questions = count(1)
        self._answered: dict[str, int] = {}
        self._held = 0
        self._answered_at = -inf
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
        idle_seconds = LET_IDLE_SECONDS if self.chats else IDLE_SECONDS
        self._streams = StreamClient(endpoint.name, endpoint.address, tls, idle_seconds=idle_seconds)
        self._watcher = asyncio.get_running_loop().create_task(self._watch(), name=f"watch {endpoint.name}")

    @property
    def name(self) -> str:
        """The endpoint's name."""
        return self.endpoint.name

    @property
    def chats(self) -> bool:
        """Whether it is asked for chats as OpenAI's API has them."""
        return self.endpoint.wire == "OpenAI"

    def update(self, endpoint: Endpoint) -> None:
        """Take a new description of the same address."""
        known, self.endpoint = self.endpoint, endpoint
        if any(getattr(known, field) != getattr(endpoint, field) for field in _PROBED):
            self._set_ready(self._ready & frozenset(endpoint.variants))  # what it goes on to offer stays in service
            self._stale.set()
        self._offer()

    def hold(self) -> None:
        """A batch is on its way to it."""
        self._held += 1
        self._empty.clear()

    def let_go(self) -> None:
        """A batch ended."""
        self._held -= 1
        if not self._held:
            self._empty.set()

    async def retire(self) -> None:
        """Close, once the batches it holds are answered. Whoever calls gives it no more of them."""
        await self._empty.wait()
        await self.close()

    def doubt(self) -> None:
        """Something went wrong with it: not ready until a probe says otherwise."""
        self._doubted.set()
        self._set_ready(frozenset())

    async def infer(self, batch: BatchRequest) -> InferResponse | ReplicaLost | NotReady | Rejected | BatchFailed:
        """Serve a batch; what goes wrong on the way is told, not raised."""
        body, headers = encoded(batch) if self._reads_binary else as_json(batch)
        path = self._path(batch.variant, "infer")
        head = request_head("POST", path, self.endpoint.address, headers, sum(map(len, body)))
        delivered = False
        try:
            async with asyncio.timeout(batch.timeout_seconds):
                connection = await self._connections.take()
                delivered = True
                reply = await connection.exchange(head, body, most_body_bytes=self._most_answer_bytes(batch))
        except TimeoutError:
            return ReplicaLost(f"{self.name} gave no answer within {batch.timeout_seconds:.1f} s", delivered=delivered)
        except ConnectionLost as error:
            return ReplicaLost(f"{self.name}: {error}", delivered=delivered)
        self._answered_at = asyncio.get_running_loop().time()
        answer = self._read(batch, reply)
        if isinstance(answer, ReplicaLost) or (reply.status == 200 and not isinstance(answer, InferResponse)):
            connection.close()  # whatever comes on it next may be another's
        else:
            self._connections.give_back(connection)
        return answer

    async def write(
        self, batch: BatchRequest, gap_seconds: float, wrote: Callable[[Chunk | LastChunk], None]
    ) -> Ending:
        """Have one row written, piece by piece; what goes wrong on the way is told, not raised."""
        try:
            order = await self._order(batch)
        except ProtocolError as error:
            return Rejected(printable(str(error)))
        return await self._streams.write(
            order,
            point=str(batch.parameters[OPERATING_POINT]),
            begin_seconds=batch.timeout_seconds,
            gap_seconds=gap_seconds,
            wrote=wrote,
        )

    async def _order(self, batch: BatchRequest) -> StreamRequest:
        """A row as this replica reads it; raises ProtocolError where one that speaks OpenAI cannot be asked for it."""
        if self.chats:
            model = self.endpoint.model_names.get(batch.variant, batch.variant)
            return await asyncio.to_thread(
                stream_request_for, model, batch.id, batch.inputs, batch.headers
            )  # megabytes
        body, headers = encoded(batch)
        return StreamRequest(self._path(batch.variant, "generate_stream"), b"".join(body), headers)

    async def count(self, batch: BatchRequest) -> tuple[int, bytes]:
        """What a row would cost, without running it: status and body; status 0 where it does not answer."""
        body, headers = encoded(batch)
        path = self._path(batch.variant, "count")
        return await self._streams.ask(path, b"".join(body), headers, batch.timeout_seconds)

    def kept_at(self, variant: str, name: str) -> str:
        """Where what it keeps under a name is pulled from."""
        scheme = "http" if self._tls() is None else "https"
        return f"{scheme}://{self.endpoint.address}{self._path(variant, 'embeddings')}/{quote(name, safe='')}"

    async def arrived(self, variant: str, request_id: str, body: bytes, seconds: float) -> bool:
        """Tell it of images that a request of its waits for; whether it heard."""
        path = self._path(variant, f"references/{quote(request_id, safe='')}")
        status, _ = await self._streams.ask(path, body, {"Content-Type": rest.JSON_CONTENT_TYPE}, seconds)
        return status == 200

    async def share(self, url: str, kept: str) -> bool:
        """Have what it keeps under a name, or will, kept once more, to be pulled from an address; whether it does."""
        body, headers = ShareRequest(of=kept).json_bytes(), {"Content-Type": rest.JSON_CONTENT_TYPE}
        status, _ = await self._streams.ask(urlsplit(url).path, body, headers, PROBE_TIMEOUT_SECONDS)
        return status == 200

    async def fetch(self, url: str, body: bytes) -> EncodedImage | None:
        """Have it keep what it has cached of an image, to be pulled from an address; what it tells, None where not.

        Raises:
            ProtocolError: it tells something else.
        """
        headers = {"Content-Type": rest.JSON_CONTENT_TYPE}
        status, told = await self._streams.ask(urlsplit(url).path, body, headers, FETCH_SECONDS)
        return read_made(told) if status == 200 else None

    async def forget(self, url: str) -> None:
        """Have it keep something no longer, which nobody will pull; if it does not hear, it forgets by itself."""
        await self._streams.delete(url, PROBE_TIMEOUT_SECONDS)

    async def facts(self, variant: str) -> dict[str, Any]:
        """What a model's metadata tell beyond the protocol; empty where it does not answer."""
        if self.chats:
            return {}
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
                connection = await self._connections.take()
                found = await self._facts(connection, variant)
        except (ConnectionLost, TimeoutError):
            return {}
        self._connections.give_back(connection)
        return found or {}

    async def _facts(self, connection: HttpConnection, variant: str) -> dict[str, Any] | None:
        """The same over a connection, None where it tells nothing; its tasks are noted.

        Of two answers that come at once, that to the later question counts: the other may be older.
        """
        question = next(self._questions)
        reply = await self._get(connection, self._path(variant, "").rstrip("/"))
        if reply.status != 200:
            return None
        found = _told(reply).get("parameters")
        facts = found if isinstance(found, dict) else {}
        if self._tasked and question > self._answered.get(variant, 0):
            self._answered[variant] = question
            self.slot.tasks[variant] = tuple(tasks_of(facts))
            self.slot.judged[variant] = task_accuracies(facts)
        return facts

    def _most_answer_bytes(self, batch: BatchRequest) -> int:
        """As many as the tensors have; a server not of ours may write them as JSON."""
        return batch.most_answer_bytes * (JSON_MULTIPLE if self.endpoint.model_names else 1)

    def _read(
        self, batch: BatchRequest, reply: Reply
    ) -> InferResponse | ReplicaLost | NotReady | Rejected | BatchFailed:
        if reply.status != 200:
            error = _told(reply)
            message = printable(str(error.get("error", f"HTTP status {reply.status}")))
            return self._of_another(batch, str(error.get("id", "")), needed=False) or self._refused(reply, message)
        try:
            answer = rest.decode_response(reply.body, reply.headers.get(rest.HEADER_LENGTH.lower()))
        except ProtocolError as error:
            return BatchFailed(f"model server {self.name}: {error}")
        return self._of_another(batch, answer.id, needed=not self.endpoint.model_names) or answer

    def _refused(self, reply: Reply, message: str) -> NotReady | Rejected | BatchFailed:
        if reply.status in NOT_READY:
            return NotReady()
        if reply.status in CALLERS_FAULT:
            return Rejected(message)
        return BatchFailed(f"model server {self.name} answered {reply.status}: {message}")

    def _of_another(self, batch: BatchRequest, received: str, *, needed: bool) -> ReplicaLost | None:
        """Lost, where this answers another batch; servers not of ours may leave the id out."""
        if received != batch.id and (received or needed):
            return ReplicaLost(f"{self.name} answered {printable(received, 64)!r} to batch {batch.id!r}")
        return None

    async def close(self) -> None:
        """Stop watching and close all connections."""
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
            self._doubted.clear()
            self._stale.clear()
            ready = await self._probe_variants()
            if not self._doubted.is_set():  # a probe that was asked before the doubt says nothing against it
                self._set_ready(ready & frozenset(self.endpoint.variants))
            doubted = await self._pause(PROBE_INTERVAL_SECONDS if ready else pause_seconds)
            if doubted:  # one that fails while it says that it is ready is not asked again at once
                await asyncio.sleep(pause_seconds)
            if ready and not doubted:
                pauses = backoff(FIRST_BACKOFF_SECONDS, PROBE_INTERVAL_SECONDS)

    def _set_ready(self, ready: frozenset[str]) -> None:
        if ready != self._ready:
            log.info("replica %s: ready for %s", self.name, ", ".join(sorted(ready)) or "nothing")
            self._ready = ready
            self._offer()
            self._on_change()

    def _offer(self) -> None:
        """Let its slot know what it can serve now: nothing while it drains."""
        self.slot.offer(frozenset() if self.endpoint.draining else self._ready)

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
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
                probe = await self._probe_connection()
                answers = {variant: await self._ask(probe, variant) for variant in self.endpoint.variants}
                for variant in [each for each, ready in answers.items() if ready] if self._tasked else ():
                    await self._facts(probe, variant)
                new = [variant for variant, ready in answers.items() if ready and variant not in self._ready]
                for variant in new if self._writes and not self.chats else ():
                    self.slot.reads_ahead -= {variant}
                    self.slot.reads_ahead |= {variant} if await self._reads_ahead(probe, variant) else frozenset()
        except (ConnectionLost, TimeoutError) as error:
            log.debug("replica %s: probe failed: %s", self.name, error)
            self._note_refused(str(error) if isinstance(error, PeerIdentityError) else "")
            if self._probe is not None:
                self._probe.close()
                self._probe = None
            # One that answers batches is no less ready for being too busy to say so.
            return self._ready if isinstance(error, TimeoutError) and self._answered_at > began else frozenset()
        self._note_refused("")
        return frozenset(variant for variant, ready in answers.items() if ready)

    async def _probe_connection(self) -> HttpConnection:
        tls = self._tls()
        if self._probe is not None and self._probe.usable and self._probe.tls is tls:
            return self._probe
        if self._probe is not None:
            self._probe.close()
        self._probe = await HttpConnection.open(self._host, self._port, tls)
        if not self.chats:
            self._reads_binary = not self.endpoint.model_names or await self._offers_binary(self._probe)
        return self._probe

    def _note_refused(self, reason: str) -> None:
        if reason and reason != self.refused:
            log.warning("replica %s gets no work: %s", self.name, reason)
        self.refused = reason

    async def _ask(self, connection: HttpConnection, variant: str) -> bool:
        path = self.endpoint.ready_path or self._path(variant, "ready")
        return (await self._get(connection, path)).status == 200

    async def _reads_ahead(self, connection: HttpConnection, variant: str) -> bool:
        """Whether a model says that it begins on a prompt before all of its images are there."""
        return (await self._facts(connection, variant) or {}).get(READS_AHEAD) is True

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


def _told(reply: Reply) -> dict[str, Any]:
    """The JSON object of an answer; empty where it is none."""
    return _object(bytes(reply.body))


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
