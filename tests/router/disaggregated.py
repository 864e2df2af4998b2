"""Chats whose images are encoded by one pool and pulled by another: fakes of both, and a router over them."""

import asyncio
import io
import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
from aiohttp import web
from PIL import Image

from tests.builders import a_variant
from tests.router.chats import ChatReplica, Written, a_chat, a_chat_pipeline, a_writer
from tests.router.fakes import FakeReplica, a_rig
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol import rest
from trimtab_protocol.chat.embedding_refs import PENDING, EncodedImage, ImageIdentity, ShareRequest
from trimtab_protocol.chat.internal_wire import content_id, expand_embedding_ids

CHAT = "/v1/chat/completions"
WHOLE, PULLS = "whole", "small"
"""Variants of a generation stage whose plan chooses where images are encoded."""


ENCODED = ("references", "encode.outputs")
ROWS = 4


def reported_references(images: np.ndarray) -> np.ndarray:
    references = np.empty(len(images), dtype=object)
    references[:] = [json.dumps({"rows": ROWS, "digest": shown_by(row[0])}).encode() for row in images]
    return references


def shown_by(file: bytes) -> str:
    return content_id("fake:1", sha256(file).hexdigest(), ROWS)


def a_picture(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (8, 8), number).save(file, "PNG")
    return file.getvalue()


class Turns:
    """Lets batches pass one by one, or all; in place of a gate."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(0)
        self._open = False

    async def wait(self) -> None:
        if not self._open:
            await self._turns.acquire()

    def let(self, count: int = 1) -> None:
        for _ in range(count):
            self._turns.release()

    def set(self) -> None:
        self._open = True
        self.let(1000)


@dataclass
class Encoder(FakeReplica):
    """Encoder that stores embeddings until they are deleted."""

    kept: set[str] = field(default_factory=set)
    shown: list[tuple[int, ...]] = field(default_factory=list)
    files: list[bytes] = field(default_factory=list)
    answers: asyncio.Event | None = None
    waiting: int = 0
    asked: list[tuple[str, bool]] = field(default_factory=list)
    on_second: Callable[[], object] = lambda: None
    shares: bool = True
    caches: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model = self._encode

    def stepped(self) -> Turns:
        self.gate = turns = Turns()  # type: ignore[assignment]
        return turns

    def _encode(self, inputs: Any) -> dict[str, np.ndarray]:
        beside = inputs["chat_images"]
        self.files += [row[0] for row in inputs["images"]]
        self.shown += [(len(row[0]), *map(int, of)) for row, of in zip(inputs["images"], beside, strict=True)]
        if len(self.shown) == 2:
            self.on_second()
        keep, rows = self.seen[-1].parameters["store_as"], len(inputs["images"])
        self.kept |= {f"{keep}-{row}" for row in range(rows)}
        return {"references": reported_references(inputs["images"])}

    async def answer_request(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path.endswith("/count"):
            asked = rest.decode_request("m", await request.read(), request.headers.get(rest.HEADER_LENGTH))
            return web.json_response({"rows": [ROWS] * len(asked.inputs[0].array)})
        if "/embeddings/" not in request.path:
            return await super().answer_request(request)
        names = set(expand_embedding_ids(request.path.rpartition("/")[2]))
        if request.method == "POST" and not self.shares:
            return web.json_response({"error": "too many names"}, status=429)
        if request.method == "POST":
            return await self._keep_also(names, ShareRequest.model_validate_json(await request.read()).of)
        self.kept -= names
        return web.json_response({"stored": len(self.kept)})

    async def _keep_also(self, names: set[str], of: str | ImageIdentity) -> web.Response:
        if not isinstance(of, str) and not (self.caches and of.file in [sha256(f).hexdigest() for f in self.files]):
            return web.json_response({"error": "not cached"}, status=404)
        if self.answers is not None and not isinstance(of, str):
            self.waiting += 1
            await self.answers.wait()
        self.kept |= names
        if isinstance(of, str):
            return web.json_response({"stored": len(names)})
        self.asked.append((of.tenant, of.alone))
        return web.json_response(EncodedImage(rows=ROWS, digest=content_id("fake:1", of.file, ROWS)).model_dump())


@dataclass
class Beginner(ChatReplica):
    """Begins on a chat before all of its images are there, and waits for those that are announced."""

    arrived_images: list[dict[str, Any]] = field(default_factory=list)
    deaf: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.facts = lambda: {"partial_prefill": True}
        self._all = asyncio.Condition()

    async def answer_request(self, request: web.BaseRequest) -> web.StreamResponse:
        if "/references/" not in request.path:
            return await super().answer_request(request)
        if self.deaf:
            return web.json_response({"error": "cannot hear"}, status=500)
        async with self._all:
            self.arrived_images += json.loads(await request.read())
            self._all.notify_all()
        return web.json_response({"resolved": len(self.arrived_images)})

    async def write_stream(self, request: web.BaseRequest, chat: Written) -> web.StreamResponse:
        given = json.loads(chat.inputs["references"][0]) if "references" in chat.inputs else []
        awaited = {one["digest"] for one in given if one["url"] == PENDING}
        async with self._all:
            await self._all.wait_for(lambda: awaited <= {one["digest"] for one in self.arrived_images})
        return await super().write_stream(request, chat)


def _reads(name: str, source: str = "request.inputs", *, optional: bool = False) -> dict[str, Any]:
    return {"name": name, "from": f"{source}.{name}", "optional": optional}


def an_encoder() -> dict[str, Any]:
    inputs = [_reads("images"), _reads("options", optional=True)]
    outputs = [{"name": "references", "datatype": "BYTES"}]
    return {"name": "encode", "inputs": inputs, "outputs": outputs, "variants": [a_variant()], "role": "Encode"}


def a_disaggregated_pipeline(encoder: dict[str, Any] | None = None) -> Any:
    read = [_reads(name, optional=True) for name in ("messages", "options")]
    return a_chat_pipeline([encoder or an_encoder(), a_writer(*read, _reads(*ENCODED, optional=True))])


@asynccontextmanager
async def reading(encoders, writers, **rig):
    async with a_rig(a_disaggregated_pipeline(), {"encode": list(encoders), "text": list(writers)}, **rig) as made:
        yield made


async def ask(rig, *images, headers=None, **fields):
    body = a_chat("one two", *images, **fields)
    async with rig.session.post(rig.url + CHAT, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


def references(writer, number=-1):
    return json.loads(writer.written[number].inputs["references"][0])


def a_choosing_writer(**changes: Any) -> dict[str, Any]:
    read = [_reads(name, optional=name != "messages") for name in ("messages", "options", "images")]
    read.append(_reads(*ENCODED, optional=True))
    return a_writer(*read, variants=[a_variant(PULLS), a_variant(WHOLE, encoder="Colocated")], **changes)


def a_choosing_pipeline(**changes: Any) -> InferencePipeline:
    return a_chat_pipeline([an_encoder(), a_choosing_writer()], **changes)


def laid_out(pipeline: InferencePipeline, *, apart: bool, generation: int = 1) -> PipelinePlan:
    stages = [
        {"name": "encode", "variant": "small", "batchSize": 8, "replicas": int(apart), "accuracy": 1.0},
        {"name": "text", "variant": PULLS if apart else WHOLE, "batchSize": 8, "replicas": 1, "accuracy": 0.9},
    ]
    spec = {"pipeline": pipeline.name, "generation": generation, "createdAt": 0.0, "stages": stages}
    return PipelinePlan.model_validate({"metadata": {"name": pipeline.name}, "spec": spec})
