"""`EncoderModel`: an image encoder without a generator, in one replica."""

import asyncio
from collections.abc import Sequence
from time import perf_counter

import numpy as np
import torch

from trimtab_model_servers import model_protocol
from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.chat.embedding_store import EmbeddingStore
from trimtab_model_servers.chat.encoder_scheduler import EncoderScheduler
from trimtab_model_servers.chat.image_decoder import ImageFile, read_image
from trimtab_model_servers.chat.interfaces import ChatComponents, ImageEmbedding, VisionEncoder
from trimtab_model_servers.chat.request_parser import image_files, read_tenants
from trimtab_model_servers.chat.warmup import encode_gray_image
from trimtab_model_servers.errors import ModelError, RefusalError
from trimtab_model_servers.model_protocol import Fact, Weights
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.stages import CHAT_IMAGE_INDEX, EMBEDDINGS_INPUT, IMAGES_INPUT
from trimtab_protocol import InferRequest, InferResponse, Tensor
from trimtab_protocol.chat.embedding_refs import MAX_IMAGES, EmbeddingCounts, EncodedImage, ImageIdentity
from trimtab_protocol.chat.internal_wire import STORE_AS, bytes_tensor, embedding_id
from trimtab_protocol.tensors import Array


class EncoderModel:
    """One encoder; ``worker`` computes for it."""

    def __init__(
        self, spec: ModelSpec, components: ChatComponents, encoder: VisionEncoder, worker: BatchWorker
    ) -> None:
        self.spec = spec
        self.weights: Weights = components.weights
        self._facts = components.facts
        parameters = components.parameters
        self.encoder_scheduler = EncoderScheduler(encoder, worker, parameters.batch_images, parameters.cache_bytes)
        self.embeddings = EmbeddingStore(parameters.store_bytes)

    def warm_up(self) -> None:
        """Encode an image; raises ModelError if that fails. Blocks."""
        try:
            encode_gray_image(self.encoder_scheduler.encoder)
        except (RuntimeError, ValueError, RefusalError) as error:
            raise ModelError(f"model {self.spec.name!r} cannot encode: {type(error).__name__}: {error}") from error

    async def infer(self, request: InferRequest, worker: BatchWorker) -> InferResponse:
        """Encode images: each row is one to store, or a chat whose embeddings are returned; raises RefusalError."""
        rows = model_protocol.validate_rows(self.spec, request.inputs)
        model_protocol.select_operating_point(self.spec, request.parameters)
        names, began = model_protocol.select_outputs(self.spec, request.requested_outputs), perf_counter()
        with worker.external_work():
            encode = self._encode_and_store if EMBEDDINGS_INPUT in names else self._encode_chat
            outputs = await encode(request, rows)
        parameters = model_protocol.response_parameters(self.spec, perf_counter() - began)
        selected = tuple(tensor for tensor in outputs if tensor.name in names)
        return InferResponse(model_name=self.spec.name, outputs=selected, id=request.id, parameters=parameters)

    def add_names(self, names: Sequence[str], of: str | ImageIdentity) -> dict[str, object]:
        """Store embeddings, of a name or those cached of an image, under further names; raises RefusalError."""
        if isinstance(of, str):
            self.embeddings.add_names(of, names)
            return {"stored": len(names)}
        cached = self.encoder_scheduler.cached(of.file, of.tenant, alone=of.alone)
        if cached is None:
            raise RefusalError(404, "the image's embeddings are not cached; have the image encoded")
        for name in names:
            self.embeddings.expect(name)
            self.embeddings.put(name, cached)
        return _encoded_image(cached).model_dump(exclude_defaults=True)

    async def count(self, request: InferRequest) -> EmbeddingCounts:
        """Rows of the embeddings of each image, one per row, above the batch size too: nothing is computed."""
        rows = model_protocol.validate_rows(self.spec, request.inputs, max_rows=MAX_IMAGES)
        images = await asyncio.to_thread(self._row_images, request, rows)
        shapes = [self.encoder_scheduler.embedding_shape(image, count) for image, _, count, _ in images]
        columns = tuple(shape.columns for shape in shapes)
        return EmbeddingCounts(rows=tuple(shape.total for shape in shapes), columns=columns if any(columns) else None)

    def pending(self) -> dict[str, int]:
        return {
            "waiting": 0,
            "running": self.encoder_scheduler.in_flight,
            "text_tokens": 0,
            "image_tokens": self.encoder_scheduler.counters.pending_tokens,
            "slots": 0,
            "busy_slots": 0,
            "embedding_bytes": self.embeddings.bytes,
            "stored_embeddings": len(self.embeddings),
        }

    def totals(self) -> dict[str, float]:
        return self.encoder_scheduler.totals()

    def facts(self) -> dict[str, Fact]:
        return model_protocol.metadata_facts(self.spec, self.weights, self._facts)

    async def close(self) -> None:
        """Do nothing: the worker finishes what is in flight."""

    async def _encode_chat(self, request: InferRequest, rows: int) -> tuple[Tensor, ...]:
        if rows != 1:
            raise RefusalError(400, f"model {self.spec.name!r} encodes one row at a time; it may have several images")
        images = await asyncio.to_thread(self._images, request, 0)
        (tenant,) = read_tenants(request, 1)
        embeddings = [
            await self.encoder_scheduler.encode(image, tenant, len(images), number)
            for number, image in enumerate(images)
        ]
        width = self.encoder_scheduler.encoder.width
        joined = torch.cat([embedding.rows for embedding in embeddings]) if embeddings else torch.zeros(0, width)
        counts = np.array([[len(embedding.rows) for embedding in embeddings]], dtype=np.int64)
        columns = np.array([[embedding.columns for embedding in embeddings]], dtype=np.int64)
        digests = bytes_tensor([embedding.digest.encode() for embedding in embeddings])
        return (
            Tensor("embeddings", "FP32", joined.numpy()[None]),
            Tensor("image_rows", "INT64", counts),
            Tensor("image_columns", "INT64", columns),
            Tensor("image_digests", "BYTES", digests[None]),
        )

    async def _encode_and_store(self, request: InferRequest, rows: int) -> tuple[Tensor, ...]:
        """Encode one image per row; if the request has a name, store all of them or none."""
        name = request.parameters.get(STORE_AS)
        images = await asyncio.to_thread(self._row_images, request, rows)
        names = [] if name is None else [embedding_id(str(name), row) for row in range(rows)]
        for row_name in names:
            self.embeddings.expect(row_name)
        try:
            embeddings = await asyncio.gather(*(self.encoder_scheduler.encode(*image) for image in images))
            for row_name, embedding in zip(names, embeddings, strict=False):
                self.embeddings.put(row_name, embedding)
        except BaseException:
            for row_name in names:
                self.embeddings.drop(row_name)
            raise
        encoded = [_encoded_image(embedding).json_bytes() for embedding in embeddings]
        return (Tensor(EMBEDDINGS_INPUT, "BYTES", bytes_tensor(encoded)),)

    def _chat_positions(self, request: InferRequest, rows: int) -> list[tuple[int, int]]:
        """For each row the number of images in its chat, and the number of this one."""
        chats = _array(request, CHAT_IMAGE_INDEX)
        if chats is None:
            return [(1, row) for row in range(rows)]
        return [(int(images), int(number)) for images, number in chats]

    def _images(self, request: InferRequest, row: int, first: int = 0) -> list[ImageFile]:
        array = _array(request, IMAGES_INPUT)
        files = () if array is None else image_files(array[row])
        return [read_image(number, file) for number, file in enumerate(files, first)]

    def _row_images(self, request: InferRequest, rows: int) -> list[tuple[ImageFile, str, int, int]]:
        """The image of each row, its tenant, the number of images in its chat, and the number of this one."""
        tenants, positions = read_tenants(request, rows), self._chat_positions(request, rows)
        return [
            (self._row_image(request, row, number), tenant, count, number)
            for row, (tenant, (count, number)) in enumerate(zip(tenants, positions, strict=True))
        ]

    def _row_image(self, request: InferRequest, row: int, number: int) -> ImageFile:
        images = self._images(request, row, number)
        if len(images) != 1:
            raise RefusalError(400, f"model {self.spec.name!r}: row {row} has {len(images)} images; send one per row")
        return images[0]


def _encoded_image(embedding: ImageEmbedding) -> EncodedImage:
    return EncodedImage(rows=len(embedding.rows), columns=embedding.columns, digest=embedding.digest)


def _array(request: InferRequest, name: str) -> Array | None:
    return next((tensor.array for tensor in request.inputs if tensor.name == name), None)
