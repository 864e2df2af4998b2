"""Runs what the scheduler planned: slots copied, embeddings spliced, one packed forward, logits of those who write."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trimtab_model_servers.engine.attention import StepContext
from trimtab_model_servers.engine.attention_masks import Places, StepMask, step_mask
from trimtab_model_servers.engine.cuda_graphs import CudaGraphPool, Recorder, Row, recorder_of
from trimtab_model_servers.engine.image_attention import ImageAttentionMask, image_attention_mask
from trimtab_model_servers.engine.kv_cache import KvCache
from trimtab_model_servers.engine.model_adapters import ModelAdapter
from trimtab_model_servers.engine.request import Image, Request
from trimtab_model_servers.engine.scheduler import Admission, Limits, PrefillChunk


@dataclass(slots=True)
class _PendingEmbeddings:
    """What is kept of a request while it is in flight."""

    request: Request
    images: list[Tensor | None]
    sight: ImageAttentionMask


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """How a step's tokens stand: each one's slot, how many are alone in theirs, and from where to where the others'."""

    slots: Places
    singles: int
    runs: list[tuple[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeBatch:
    """A step of those who write alone: of whom the next step is, and from what it follows where it is theirs again."""

    next: list[tuple[str, int, int]]
    context: StepContext


@dataclass(frozen=True, slots=True, eq=False)
class DecodeLogits:
    """Who writes a token, and from which logits, [n, vocabulary]."""

    request_ids: tuple[str, ...]
    logits: Tensor


class ModelRunner:
    """The part that computes. One thread calls it at a time."""

    def __init__(self, family: ModelAdapter, limits: Limits, recorder: Recorder | None = None) -> None:
        """Allocate all slots; ``recorder`` records steps (None: as the device of the model has it)."""
        self.family = family
        like = family.embed(torch.zeros(1, dtype=torch.int64))[:0]
        self._like = like
        self._device = like.device
        recorder = recorder or recorder_of(like.device)
        slots = limits.slots + (recorder is not None)
        self._own = KvCache(family.own_layers, family.heads, slots, limits.slot_tokens, like)
        self._across = KvCache(family.across_layers, family.heads, slots, limits.image_tokens, like)
        self._replays = recorder and CudaGraphPool(family, (self._own, self._across), limits.slots, like, recorder)
        if self._replays is not None:
            self._replays.prepare()
        self._held: dict[str, _PendingEmbeddings] = {}
        self._writers: _DecodeBatch | None = None

    @property
    def embedding_bytes(self) -> int:
        """What is kept of images of requests in flight."""
        return sum(image.nbytes for held in self._held.values() for image in held.images if image is not None)

    @property
    def held(self) -> int:
        """Requests of which anything is kept."""
        return len(self._held)

    def hold(self, request: Request, images: Sequence[Tensor | None]) -> None:
        """Keep a request's images; None for one that is still encoded.

        Raises:
            RequestError: an image's embeddings are not what the model takes.
        """
        checked = [
            None if given is None else self.family.require(given, image.rows)
            for image, given in zip(request.images, images, strict=True)
        ]
        self._held[request.id] = _PendingEmbeddings(
            request, checked, image_attention_mask(len(request.tokens), request.images)
        )

    def supply(self, request_id: str, image: int, embeddings: Tensor) -> None:
        """Keep an image that was still encoded.

        Raises:
            RequestError: the embeddings are not what the model takes.
        """
        held = self._held[request_id]
        held.images[image] = self.family.require(embeddings, held.request.images[image].rows)

    def release(self, request_id: str) -> None:
        """Let go of what is kept of a request."""
        self._held.pop(request_id, None)

    def wipe(self, slot: int) -> None:
        """Clear a slot whose numbers may be no numbers."""
        self._own.clear(slot)
        self._across.clear(slot)

    @torch.inference_mode()
    def admit(self, admission: Admission) -> None:
        """Bring a request's prefix into its slot, and its images in a model that attends across."""
        lease, held = admission.lease, self._held[admission.request.id]
        if lease.source is not None:
            self._own.copy(lease.source, lease.slot, lease.reused)
            self._across.copy(lease.source, lease.slot, sum(image.rows for image in held.request.images))
        elif self.family.across and held.images and not lease.reused:
            images = _padding_last(held)
            places = torch.arange(len(images), device=self._device)
            rows = self._across.rows(torch.full_like(places, lease.slot), places)
            for layer, (keys, values) in self.family.keys_and_values(images).items():
                self._across.write(layer, rows, keys, values)

    @torch.inference_mode()
    def run(self, parts: Sequence[PrefillChunk]) -> DecodeLogits:
        """Compute the parts of a step; computing one again leaves the same behind."""
        parts = sorted(parts, key=lambda part: (len(part.tokens) != 1, part.slot))
        before, self._writers = self._writers, None  # a step that fails leaves nothing to go on from
        alone = all(part.writes and len(part.tokens) == 1 for part in parts)
        if alone and self._replays is not None and all(self._written(part) for part in parts):
            logits = self._replays.logits([self._row(part) for part in parts])
            if logits is not None:
                return DecodeLogits(tuple(part.request_id for part in parts), logits)
        context = before.context.moved_on() if before and alone and before.next == _stand(parts, 0) else None
        embedded = self.family.embed(torch.tensor([token for part in parts for token in part.tokens]).to(self._device))
        if context is None:
            context = self._context(parts)
            self._splice(parts, embedded)
        hidden = self.family.forward(embedded, context.positions, context)
        if alone:
            self._writers = _DecodeBatch(_stand(parts, 1), context)
            return DecodeLogits(tuple(part.request_id for part in parts), self.family.logits(hidden))
        ends = np.cumsum([len(part.tokens) for part in parts]).tolist()
        last = [end - 1 for part, end in zip(parts, ends, strict=True) if part.writes]
        logits = self.family.logits(hidden[last]) if last else hidden.new_empty(0, self.family.vocabulary)
        return DecodeLogits(tuple(part.request_id for part in parts if part.writes), logits)

    def _written(self, part: PrefillChunk) -> bool:
        """Whether a part is of what was written: no image's."""
        return part.start >= len(self._held[part.request_id].request.tokens)

    def _row(self, part: PrefillChunk) -> Row:
        """A part of one token as recorded steps have it."""
        row, held = Row(part.slot, part.tokens[0], part.start), self._held[part.request_id]
        if not self.family.across or not held.request.images:
            return row
        low, high, behind = (column.item() for column in held.sight.at(part.start, 1))
        return replace(row, low=low, high=high, sighted=True, behind=bool(behind))

    def _context(self, parts: Sequence[PrefillChunk]) -> StepContext:
        """Work out where the tokens of a step stand and what they see; those alone in their slot come first."""
        counts = [len(part.tokens) for part in parts]
        slots, ends = np.repeat([part.slot for part in parts], counts), np.cumsum(counts).tolist()
        places = np.concatenate([np.arange(part.start, part.start + len(part.tokens)) for part in parts])
        singles = counts.count(1)
        runs = [(end - count, end) for count, end in zip(counts[singles:], ends[singles:], strict=True)]
        layout, positions = _Layout(slots, singles, runs), self._tensor(places)
        own = self._sight(layout, np.zeros_like(places), places + 1)
        context = StepContext((self._own, own), positions, self._own.rows(self._tensor(slots), positions))
        if self.family.across and any(self._held[part.request_id].request.images for part in parts):
            return self._looking(parts, context, layout)
        return context

    def _splice(self, parts: Sequence[PrefillChunk], embedded: Tensor) -> None:
        """Put images' embeddings where their placeholders' stand, [tokens, width]."""
        if self.family.across:
            return
        at = 0
        for part in parts:
            end = part.start + len(part.tokens)
            held = self._held[part.request_id]
            shown = held.request.images if part.start < len(held.request.tokens) else ()
            for image, given in zip(shown, held.images, strict=False):
                if given is not None:
                    for first, last, row in _within(image, part.start, end):
                        embedded[at + first - part.start : at + last - part.start] = given[row : row + last - first]
            at += len(part.tokens)

    def _looking(self, parts: Sequence[PrefillChunk], context: StepContext, layout: _Layout) -> StepContext:
        """Add what the parts see of their images."""
        seen = [self._held[part.request_id].sight.at(part.start, len(part.tokens)) for part in parts]
        low, high, behind = (np.concatenate(columns) for columns in zip(*seen, strict=True))
        sighted = [bool(self._held[part.request_id].request.images) for part in parts for _ in part.tokens]
        dtype = self._like.dtype
        return replace(
            context,
            across=(self._across, self._sight(layout, low, high)),
            sighted=None if all(sighted) else torch.tensor(sighted, device=self._device, dtype=dtype)[:, None, None],
            sees_images=None if behind.all() else torch.from_numpy(behind).to(self._device, dtype)[:, None],
        )

    def _sight(self, layout: _Layout, low: Places, high: Places) -> StepMask:
        return step_mask(
            layout.slots, (low, high), layout.singles, layout.runs, group=self.family.heads.group, like=self._like
        )

    def _tensor(self, numbers: Places) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64)).to(self._device)


def _within(image: Image, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Which positions from ``start`` to ``end`` are an image's: from where to where, and the first one's row."""
    row = 0
    for place, count in image.runs:
        first, last = max(place, start), min(place + count, end)
        if first < last:
            yield first, last, row + first - place
        row += count


def _stand(parts: Sequence[PrefillChunk], further: int) -> list[tuple[str, int, int]]:
    """Who stands in which slot at which position, ``further`` on."""
    return [(part.request_id, part.slot, part.start + further) for part in parts]


def _padding_last(held: _PendingEmbeddings) -> Tensor:
    """A request's image tokens as they lie in its slot, [tokens, width]."""
    given = [(image, rows) for image, rows in zip(held.request.images, held.images, strict=True) if rows is not None]
    shown = [rows[: image.tokens] for image, rows in given]
    return torch.cat([*shown, *(rows[image.tokens :] for image, rows in given)])
