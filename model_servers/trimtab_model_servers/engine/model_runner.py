"""`ModelRunner`: executes a scheduled step: prefix copies, image embeddings, one packed forward pass, logits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trimtab_model_servers.engine.attention import StepContext
from trimtab_model_servers.engine.attention_masks import PositionArray, StepMask, step_mask
from trimtab_model_servers.engine.cuda_graphs import CudaGraphPool, DecodeRow, GraphCapture, default_graph_capture
from trimtab_model_servers.engine.image_attention import ImageAttentionMask, image_attention_mask
from trimtab_model_servers.engine.kv_cache import KvCache
from trimtab_model_servers.engine.model_adapters import ModelAdapter
from trimtab_model_servers.engine.request import Image, Request
from trimtab_model_servers.engine.scheduler import Admission, EngineLimits, ScheduledChunk


@dataclass(slots=True)
class _RequestImages:
    """A request in flight and the embeddings of its images; None for images that are still encoded."""

    request: Request
    embeddings: list[Tensor | None]
    mask: ImageAttentionMask


@dataclass(frozen=True, slots=True, eq=False)
class _PackedTokens:
    """Order of a step's tokens: slot of each, number of leading decodes, (start, end) of each prefill chunk."""

    slots: PositionArray
    decodes: int
    chunks: list[tuple[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeBatch:
    """A decode-only step: the requests and positions of the next step, and the context to reuse if they match."""

    next: list[tuple[str, int, int]]
    context: StepContext


@dataclass(frozen=True, slots=True, eq=False)
class DecodeLogits:
    """Next-token logits of the requests that sample, [n, vocabulary]."""

    request_ids: tuple[str, ...]
    logits: Tensor


class ModelRunner:
    """Model, KV caches and image embeddings of the requests in flight; called by one thread at a time."""

    def __init__(self, adapter: ModelAdapter, limits: EngineLimits, graph_capture: GraphCapture | None = None) -> None:
        """Allocate all slots; ``graph_capture`` captures decode steps (None: the default of the model's device)."""
        self.adapter = adapter
        like = adapter.embed(torch.zeros(1, dtype=torch.int64))[:0]
        self._like = like
        self._device = like.device
        capture = graph_capture or default_graph_capture(like.device)
        slots = limits.slots + (capture is not None)
        self._text_cache = KvCache(adapter.self_attention_layers, adapter.heads, slots, limits.slot_tokens, like)
        self._image_cache = KvCache(adapter.cross_attention_layers, adapter.heads, slots, limits.image_tokens, like)
        caches = (self._text_cache, self._image_cache)
        self._graphs = capture and CudaGraphPool(adapter, caches, limits.slots, like, capture)
        if self._graphs is not None:
            self._graphs.capture_text_only()
        self._requests: dict[str, _RequestImages] = {}
        self._last_decode: _DecodeBatch | None = None

    @property
    def embedding_bytes(self) -> int:
        return sum(image.nbytes for entry in self._requests.values() for image in entry.embeddings if image is not None)

    @property
    def request_count(self) -> int:
        return len(self._requests)

    def add_request(self, request: Request, images: Sequence[Tensor | None]) -> None:
        """Store embeddings, None for images still encoded; raises RequestError if they do not fit the model."""
        embeddings = [
            None if rows is None else self.adapter.validate_embeddings(rows, image.rows)
            for image, rows in zip(request.images, images, strict=True)
        ]
        mask = image_attention_mask(len(request.tokens), request.images)
        self._requests[request.id] = _RequestImages(request, embeddings, mask)

    def add_embeddings(self, request_id: str, image: int, embeddings: Tensor) -> None:
        """Store the embeddings of an image that has been encoded; raises RequestError if they do not fit the model."""
        entry = self._requests[request_id]
        entry.embeddings[image] = self.adapter.validate_embeddings(embeddings, entry.request.images[image].rows)

    def remove_request(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def clear_slot(self, slot: int) -> None:
        self._text_cache.clear_slot(slot)
        self._image_cache.clear_slot(slot)

    @torch.inference_mode()
    def admit(self, admission: Admission) -> None:
        """Copy a request's reused prefix to its slot; with cross-attention, also fill the slot's image cache."""
        lease, entry = admission.lease, self._requests[admission.request.id]
        if lease.copy_from is not None:
            self._text_cache.copy_prefix(lease.copy_from, lease.slot, lease.reused_tokens)
            image_rows = sum(image.rows for image in entry.request.images)
            self._image_cache.copy_prefix(lease.copy_from, lease.slot, image_rows)
        elif self.adapter.cross_attention and entry.embeddings and not lease.reused_tokens:
            images = _padding_last(entry)
            positions = torch.arange(len(images), device=self._device)
            rows = self._image_cache.row_indices(torch.full_like(positions, lease.slot), positions)
            for layer, (keys, values) in self.adapter.cross_attention_kv(images).items():
                self._image_cache.write(layer, rows, keys, values)

    @torch.inference_mode()
    def run(self, chunks: Sequence[ScheduledChunk]) -> DecodeLogits:
        """Compute the chunks of a step; computing one again has the same result."""
        chunks = sorted(chunks, key=lambda chunk: (len(chunk.tokens) != 1, chunk.slot))
        previous, self._last_decode = self._last_decode, None  # a failed step leaves no context to reuse
        decode_only = all(chunk.samples and len(chunk.tokens) == 1 for chunk in chunks)
        if decode_only and self._graphs is not None and all(self._is_generated(chunk) for chunk in chunks):
            logits = self._graphs.logits([self._decode_row(chunk) for chunk in chunks])
            if logits is not None:
                return DecodeLogits(tuple(chunk.request_id for chunk in chunks), logits)
        reusable = previous is not None and decode_only and previous.next == _positions_after(chunks, 0)
        context = previous.context.advance() if previous is not None and reusable else None
        tokens = torch.tensor([token for chunk in chunks for token in chunk.tokens])
        embedded = self.adapter.embed(tokens.to(self._device))
        if context is None:
            context = self._context(chunks)
            self._insert_images(chunks, embedded)
        hidden = self.adapter.forward(embedded, context.positions, context)
        if decode_only:
            self._last_decode = _DecodeBatch(_positions_after(chunks, 1), context)
            return DecodeLogits(tuple(chunk.request_id for chunk in chunks), self.adapter.logits(hidden))
        ends = np.cumsum([len(chunk.tokens) for chunk in chunks]).tolist()
        last = [end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.samples]
        logits = self.adapter.logits(hidden[last]) if last else hidden.new_empty(0, self.adapter.vocabulary_size)
        return DecodeLogits(tuple(chunk.request_id for chunk in chunks if chunk.samples), logits)

    def _is_generated(self, chunk: ScheduledChunk) -> bool:
        return chunk.start >= len(self._requests[chunk.request_id].request.tokens)

    def _decode_row(self, chunk: ScheduledChunk) -> DecodeRow:
        row, entry = DecodeRow(chunk.slot, chunk.tokens[0], chunk.start), self._requests[chunk.request_id]
        if not self.adapter.cross_attention or not entry.request.images:
            return row
        low, high, after_image = (column.item() for column in entry.mask.at(chunk.start, 1))
        return replace(row, low=low, high=high, has_images=True, after_image=bool(after_image))

    def _context(self, chunks: Sequence[ScheduledChunk]) -> StepContext:
        """Positions, KV cache rows and masks of a step; chunks of one token come first."""
        counts = [len(chunk.tokens) for chunk in chunks]
        slots, ends = np.repeat([chunk.slot for chunk in chunks], counts), np.cumsum(counts).tolist()
        offsets = np.concatenate([np.arange(chunk.start, chunk.start + len(chunk.tokens)) for chunk in chunks])
        decodes = counts.count(1)
        prefills = [(end - count, end) for count, end in zip(counts[decodes:], ends[decodes:], strict=True)]
        packed, positions = _PackedTokens(slots, decodes, prefills), self._tensor(offsets)
        mask = self._mask(packed, np.zeros_like(offsets), offsets + 1)
        cache_rows = self._text_cache.row_indices(self._tensor(slots), positions)
        context = StepContext((self._text_cache, mask), positions, cache_rows)
        if self.adapter.cross_attention and any(self._requests[chunk.request_id].request.images for chunk in chunks):
            return self._with_images(chunks, context, packed)
        return context

    def _insert_images(self, chunks: Sequence[ScheduledChunk], embedded: Tensor) -> None:
        """Replace the rows of image placeholders in ``embedded`` [tokens, width] by the images' embeddings."""
        if self.adapter.cross_attention:
            return
        offset = 0
        for chunk in chunks:
            end = chunk.start + len(chunk.tokens)
            entry = self._requests[chunk.request_id]
            images = entry.request.images if chunk.start < len(entry.request.tokens) else ()
            for image, rows in zip(images, entry.embeddings, strict=False):
                if rows is not None:
                    for first, last, row in _placeholders_within(image, chunk.start, end):
                        target = slice(offset + first - chunk.start, offset + last - chunk.start)
                        embedded[target] = rows[row : row + last - first]
            offset += len(chunk.tokens)

    def _with_images(
        self, chunks: Sequence[ScheduledChunk], context: StepContext, packed: _PackedTokens
    ) -> StepContext:
        columns = [self._requests[chunk.request_id].mask.at(chunk.start, len(chunk.tokens)) for chunk in chunks]
        low, high, after_image = (np.concatenate(column) for column in zip(*columns, strict=True))
        has_images = [bool(self._requests[chunk.request_id].request.images) for chunk in chunks for _ in chunk.tokens]
        dtype = self._like.dtype
        return replace(
            context,
            cross_attention=(self._image_cache, self._mask(packed, low, high)),
            has_images=None
            if all(has_images)
            else torch.tensor(has_images, device=self._device, dtype=dtype)[:, None, None],
            after_image=None if after_image.all() else torch.from_numpy(after_image).to(self._device, dtype)[:, None],
        )

    def _mask(self, packed: _PackedTokens, low: PositionArray, high: PositionArray) -> StepMask:
        group = self.adapter.heads.group_size
        return step_mask(packed.slots, (low, high), packed.decodes, packed.chunks, group=group, like=self._like)

    def _tensor(self, numbers: PositionArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64)).to(self._device)


def _placeholders_within(image: Image, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first, last, embedding row of first) for an image's runs of placeholders from ``start`` to ``end``."""
    row = 0
    for run_start, count in image.runs:
        first, last = max(run_start, start), min(run_start + count, end)
        if first < last:
            yield first, last, row + first - run_start
        row += count


def _positions_after(chunks: Sequence[ScheduledChunk], steps: int) -> list[tuple[str, int, int]]:
    """Request, slot and position of each chunk after ``steps`` further tokens."""
    return [(chunk.request_id, chunk.slot, chunk.start + steps) for chunk in chunks]


def _padding_last(entry: _RequestImages) -> Tensor:
    """A request's image embeddings in the order of its slot, [tokens, width]: all tokens, then all padding."""
    images = [
        (image, rows) for image, rows in zip(entry.request.images, entry.embeddings, strict=True) if rows is not None
    ]
    tokens = [rows[: image.tokens] for image, rows in images]
    return torch.cat([*tokens, *(rows[image.tokens :] for image, rows in images)])
