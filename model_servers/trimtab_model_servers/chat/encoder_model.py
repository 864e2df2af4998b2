"""A model that encodes images for others, in one replica."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.chat import image_decoder, messages
from trimtab_model_servers.chat.config import ChatComponents
from trimtab_model_servers.chat.embedding_store import EmbeddingStore, StoredEmbedding
from trimtab_model_servers.chat.encoder_scheduler import Encoded, EncoderScheduler, Limits, done_by
from trimtab_model_servers.chat.interfaces import VisionEncoder
from trimtab_model_servers.chat.request_parser import files_of
from trimtab_model_servers.chat.responses import text_tensor
from trimtab_model_servers.chat.warmup import encode_one
from trimtab_model_servers.errors import ModelError, RefusalError
from trimtab_model_servers.model_metadata import Fact, Weights, metadata_facts, metadata_of, response_parameters
from trimtab_model_servers.request_validation import chosen_outputs, chosen_point, validate_rows
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.stages import CHAT_IMAGE_INDEX, EMBEDDINGS_INPUT, IMAGES_INPUT
from trimtab_protocol import InferRequest, InferResponse, Tensor
from trimtab_protocol.chat.embedding_refs import MOST_IMAGES, CountedImages, EncodedImage, Identity
from trimtab_protocol.chat.internal_wire import KEEP, content_of, embedding_id
from trimtab_protocol.tensors import Array

OPENING_THREADS = 2


@dataclass(frozen=True, slots=True)
class _Shown:
    """One image: its file, what that says of itself, whose it is, and its number in its chat."""

    file: bytes
    header: image_decoder.Header
    tenant: str
    number: int


class EncoderModel:
    """One encoder; ``worker`` computes for it."""

    def __init__(self, spec: ModelSpec, built: ChatComponents, seeing: VisionEncoder, worker: BatchWorker) -> None:
        self.spec = spec
        self.weights: Weights = built.weights
        self._facts = built.facts
        limits = Limits(built.parameters.batch_images, built.parameters.cache_bytes)
        openers = ThreadPoolExecutor(OPENING_THREADS, thread_name_prefix="opening")
        self.encoding = EncoderScheduler(seeing, worker, openers, limits)
        self.kept = EmbeddingStore(built.parameters.kept_bytes)

    def warm_up(self) -> None:
        """Encode an image; raises ModelError where that fails. Blocks."""
        try:
            encode_one(self.encoding.seeing)
        except (RuntimeError, ValueError, RefusalError) as error:
            raise ModelError(f"model {self.spec.name!r} cannot encode: {type(error).__name__}: {error}") from error

    async def infer(self, request: InferRequest, worker: BatchWorker) -> InferResponse:
        """Encode images: a row is an image to be kept and pulled, or else a chat whose embeddings are the answer.

        Raises:
            RefusalError: 400, 413 or 422 what does not fit; 429 too much is kept; 500 or 503 what failed.
        """
        rows = validate_rows(self.spec, request.inputs)
        chosen_point(self.spec, request.parameters)
        wanted, began = chosen_outputs(self.spec, request.requested_outputs), perf_counter()
        with worker.elsewhere():
            outputs = await (self._kept(request, rows) if EMBEDDINGS_INPUT in wanted else self._given(request, rows))
        told = response_parameters(self.spec, perf_counter() - began)
        chosen = tuple(tensor for tensor in outputs if tensor.name in wanted)
        return InferResponse(model_name=self.spec.name, outputs=chosen, id=request.id, parameters=told)

    def keep_also(self, names: Sequence[str], of: str | Identity) -> dict[str, object]:
        """Keep under further names what is kept under one, or will be, or what is cached of an image.

        Raises:
            RefusalError: 404 nothing is cached of it; 429 too much is kept.
        """
        if isinstance(of, str):
            self.kept.share(of, names)
            return {"kept": len(names)}
        cached = self.encoding.cached(of.file, of.tenant, alone=of.alone)
        if cached is None:
            raise RefusalError(404, "what was made of that image is not cached, or not any more; have it encoded")
        held = self._held(cached, of.file)
        for name in names:
            self.kept.expect(name)
            self.kept.put(name, held)
        return _made(held).model_dump(exclude_defaults=True)

    def count(self, request: InferRequest) -> CountedImages:
        """Tell how many rows the embeddings of each image would have, an image a row; errors as of ``infer``.

        Nothing is computed, so that one request may show all images of a chat, however few a batch may hold.
        """
        rows = validate_rows(self.spec, request.inputs, most=MOST_IMAGES)
        seeing, beside = self.encoding.seeing, self._beside(request, rows)
        headers = [self._only(request, row, number).header for row, (_, number) in enumerate(beside)]
        counts = [
            seeing.rows(seeing.rule.count(header.width_px, header.height_px, images=of_chat))
            for header, (of_chat, _) in zip(headers, beside, strict=True)
        ]
        columns = tuple(count.columns for count in counts)
        return CountedImages(rows=tuple(count.total for count in counts), columns=columns if any(columns) else None)

    def pending(self) -> dict[str, int]:
        """What is in flight; see docs/develop/chat-stages.md."""
        counts = self.encoding.counts
        return {
            "waiting": 0,
            "running": self.encoding.in_flight,
            "text_tokens": 0,
            "image_tokens": counts.pending_tokens,
            "slots": 0,
            "busy_slots": 0,
            "embedding_bytes": self.kept.bytes,
            "kept": len(self.kept),
        }

    def done(self) -> dict[str, float]:
        """What it has done since it started."""
        return done_by(self.encoding)

    def metadata(self) -> dict[str, object]:
        """The protocol's model metadata, with our own facts under `parameters`."""
        return metadata_of(self.spec, self.facts())

    def facts(self) -> dict[str, Fact]:
        """What this model is, beyond its tensors."""
        return metadata_facts(self.spec, self.weights, self._facts)

    async def close(self) -> None:
        """Nothing to stop: what it has under way is its worker's."""

    async def _given(self, request: InferRequest, rows: int) -> tuple[Tensor, ...]:
        """The embeddings of one chat's images."""
        if rows != 1:
            raise RefusalError(400, f"model {self.spec.name!r} encodes one row at a time; images may be several")
        shown = self._shown(request, 0)
        held = [await self._encoded(one, len(shown)) for one in shown]
        joined = torch.cat([one.rows for one in held]) if held else torch.zeros(0, self.encoding.seeing.width)
        counts = np.array([[len(one.rows) for one in held]], dtype=np.int64)
        digests = text_tensor("image_digests", [one.digest for one in held])
        return (
            Tensor("embeddings", "FP32", joined.numpy()[None]),
            Tensor("image_rows", "INT64", counts),
            Tensor("image_columns", "INT64", np.array([[one.columns for one in held]], dtype=np.int64)),
            Tensor("image_digests", "BYTES", digests.array[None]),
        )

    async def _kept(self, request: InferRequest, rows: int) -> tuple[Tensor, ...]:
        """Encode an image a row, and keep each under its name where there is one; all or none of them."""
        name, beside = request.parameters.get(KEEP), self._beside(request, rows)
        shown = [self._only(request, row, number) for row, (_, number) in enumerate(beside)]
        names = [] if name is None else [embedding_id(str(name), row) for row in range(rows)]
        for each in names:
            self.kept.expect(each)
        try:
            held = await asyncio.gather(*(self._encoded(one, of) for one, (of, _) in zip(shown, beside, strict=True)))
            for each, one in zip(names, held, strict=False):
                self.kept.put(each, one)
        except BaseException:
            for each in names:
                self.kept.drop(each)
            raise
        return (text_tensor(EMBEDDINGS_INPUT, [_made(one).json_bytes().decode() for one in held]),)

    def _beside(self, request: InferRequest, rows: int) -> list[tuple[int, int]]:
        """Of each row how many images its chat has, and which of them it is."""
        chats = _tensor(request, CHAT_IMAGE_INDEX)
        return [(1, row) for row in range(rows)] if chats is None else [(int(of), int(which)) for of, which in chats]

    def _shown(self, request: InferRequest, row: int, first: int = 0) -> list[_Shown]:
        """The images of a row, which are numbered from ``first``."""
        options = _tensor(request, "options")
        tenant = messages.read_options(None if options is None else bytes(options[row])).tenant
        given = _tensor(request, IMAGES_INPUT)
        files = () if given is None else files_of(given[row])
        return [_Shown(file, image_decoder.header_of(at, file), tenant, at) for at, file in enumerate(files, first)]

    def _only(self, request: InferRequest, row: int, number: int) -> _Shown:
        shown = self._shown(request, row, number)
        if len(shown) != 1:
            raise RefusalError(400, f"model {self.spec.name!r}: row {row} has {len(shown)} images; send one a row")
        return shown[0]

    async def _encoded(self, shown: _Shown, of_chat: int) -> StoredEmbedding:
        try:
            encoded = await self.encoding.encode(shown.file, shown.header, shown.tenant, of_chat)
        except image_decoder.BadImage as bad:
            raise bad.of_chat(shown.number) from bad
        return self._held(encoded, shown.header.digest)

    def _held(self, encoded: Encoded, file_digest: str) -> StoredEmbedding:
        content = content_of(self.encoding.seeing.name, file_digest, len(encoded.rows))
        return StoredEmbedding(encoded.rows, content, encoded.columns)


def _made(held: StoredEmbedding) -> EncodedImage:
    return EncodedImage(rows=len(held.rows), columns=held.columns, digest=held.digest)


def _tensor(request: InferRequest, name: str) -> Array | None:
    return next((tensor.array for tensor in request.inputs if tensor.name == name), None)
