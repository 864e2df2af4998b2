"""A model that encodes images for others, in one replica."""

from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import numpy as np
import torch

from trimtab_model_servers.chat import images, words
from trimtab_model_servers.chat.encoding import Encoding, Limits, done_by
from trimtab_model_servers.chat.kept import Held, Kept
from trimtab_model_servers.chat.kit import Seeing
from trimtab_model_servers.chat.parts import Built
from trimtab_model_servers.chat.rows import files_of
from trimtab_model_servers.chat.told import text_tensor
from trimtab_model_servers.chat.trial import encode_one
from trimtab_model_servers.described import Fact, Weights, answered, facts_of, metadata_of
from trimtab_model_servers.errors import ModelError, RefusalError
from trimtab_model_servers.requests import checked_rows, chosen_outputs, chosen_point
from trimtab_model_servers.worker import BatchWorker
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_protocol import InferRequest, InferResponse, Tensor

KEEP, OF_IMAGES = "keep", "images"
OPENING_THREADS = 2


class HostedEncoder:
    """One encoder; ``worker`` computes for it."""

    def __init__(self, spec: ModelSpec, built: Built, seeing: Seeing, worker: BatchWorker) -> None:
        self.spec = spec
        self.weights: Weights = built.weights
        self._facts = built.facts
        limits = Limits(built.parameters.batch_images, built.parameters.cache_bytes)
        openers = ThreadPoolExecutor(OPENING_THREADS, thread_name_prefix="opening")
        self.encoding = Encoding(seeing, worker, openers, limits)
        self.kept = Kept(built.parameters.kept_bytes)

    def warm_up(self) -> None:
        """Encode an image; raises ModelError where that fails. Blocks."""
        try:
            encode_one(self.encoding.seeing)
        except (RuntimeError, ValueError, RefusalError) as error:
            raise ModelError(f"model {self.spec.name!r} cannot encode: {type(error).__name__}: {error}") from error

    async def infer(self, request: InferRequest, worker: BatchWorker) -> InferResponse:
        """Encode the images of the only row of a request, and give the embeddings, or keep them to be pulled.

        Raises:
            RefusalError: 400, 413 or 422 what does not fit; 429 too much is kept; 500 or 503 what failed.
        """
        if checked_rows(self.spec, request.inputs) != 1:
            raise RefusalError(400, f"model {self.spec.name!r} encodes one row at a time; images may be several")
        chosen_point(self.spec, request.parameters)
        name, began = request.parameters.get(KEEP), perf_counter()
        with worker.elsewhere():
            outputs = await (self._given(request) if name is None else self._kept(request, str(name)))
        wanted = chosen_outputs(self.spec, request.requested_outputs)
        told = answered(self.spec, perf_counter() - began)
        chosen = tuple(tensor for tensor in outputs if tensor.name in wanted)
        return InferResponse(model_name=self.spec.name, outputs=chosen, id=request.id, parameters=told)

    def pending(self) -> dict[str, int]:
        """What is in flight; see docs/chat-stages.md."""
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
        return facts_of(self.spec, self.weights, self._facts)

    async def close(self) -> None:
        """Nothing to stop: what it has under way is its worker's."""

    async def _given(self, request: InferRequest) -> tuple[Tensor, ...]:
        held = await self._encoded(request)
        joined = torch.cat([one.rows for one in held]) if held else torch.zeros(0, self.encoding.seeing.width)
        return (Tensor("embeddings", "FP32", joined.numpy()[None]), *_told(held))

    async def _kept(self, request: InferRequest, name: str) -> tuple[Tensor, ...]:
        """Keep the only image's embeddings; whoever waits for the name learns of any failure."""
        self.kept.expect(name)
        try:
            held = await self._encoded(request)
            self.kept.put(name, _only(held))
        except RefusalError as refusal:
            self.kept.refuse(name, refusal)
            raise
        except BaseException:
            self.kept.drop(name)
            raise
        return _told(held)

    async def _encoded(self, request: InferRequest) -> list[Held]:
        given = {tensor.name: tensor.array for tensor in request.inputs}
        tenant = words.read_options(bytes(given["options"][0]) if "options" in given else None).tenant
        files = files_of(given["images"][0]) if "images" in given else ()
        images_of_chat = int(request.parameters.get(OF_IMAGES, len(files)))
        headers = [images.header(number, file) for number, file in enumerate(files)]
        seeing = self.encoding.seeing
        made = []
        for file, header in zip(files, headers, strict=True):
            rows = await self.encoding.encode(file, header, tenant, images_of_chat)
            made.append(Held(rows, f"{seeing.name}:{header.digest}:{len(rows)}"))
        return made


def _only(held: list[Held]) -> Held:
    if len(held) != 1:
        raise RefusalError(400, f"{len(held)} images came to be kept under one name; send one")
    return held[0]


def _told(held: list[Held]) -> tuple[Tensor, ...]:
    rows = np.array([[len(one.rows) for one in held]], dtype=np.int64)
    digests = text_tensor("image_digests", [one.digest for one in held])
    return Tensor("image_rows", "INT64", rows), Tensor("image_digests", "BYTES", digests.array[None])
