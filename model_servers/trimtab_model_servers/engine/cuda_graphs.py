"""`CudaGraphPool`: decode steps captured once per shape and replayed, because launching a kernel costs more than it.

A captured step has one row per slot. Rows of slots that do not decode are computed and discarded: their keys and values
go to an extra slot that no request uses. Attention covers the same number of positions in all slots, the longest one
rounded up to a power of two, so that there are few shapes.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from trimtab_model_servers.engine.attention import StepContext
from trimtab_model_servers.engine.attention_masks import DecodeMask, StepMask
from trimtab_model_servers.engine.kv_cache import KvCache
from trimtab_model_servers.engine.model_adapters import ModelAdapter

MIN_LENGTH: Final = 256
_WARM_UPS: Final = 2
_CUDA: Final[Any] = torch.cuda  # partly untyped
_LOG = logging.getLogger(__name__)

StepFunction = Callable[[], Tensor]
GraphCapture = Callable[[StepFunction], StepFunction]
"""Captures a step; the result computes it again on the current content of its input tensors."""


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One decoding request: its token, position and slot, and the image tokens that it attends to."""

    slot: int
    token: int
    position: int
    low: int = 0
    """First image token, with cross-attention."""
    high: int = 1
    """One past the last image token."""
    has_images: bool = False
    after_image: bool = False


class CudaGraphPool:
    """Captured decode steps over the KV caches of text and images, whose last slot, ``slots``, is unused."""

    def __init__(
        self, adapter: ModelAdapter, caches: tuple[KvCache, KvCache], slots: int, like: Tensor, capture: GraphCapture
    ) -> None:
        self._adapter, (self._text_cache, self._image_cache), self._slots = adapter, caches, slots
        self._capture = capture
        self._like = like
        self._inputs = torch.zeros(7, slots, dtype=torch.int64, device=like.device)
        self._slot_rows = torch.arange(slots, device=like.device)
        self._graphs: dict[tuple[int, int], StepFunction] = {}
        self._failed = False

    @torch.inference_mode()
    def capture_text_only(self) -> None:
        """Capture all text-only shapes before the first request; shapes with images are captured on first use."""
        self._inputs.copy_(torch.tensor(self._columns([])))
        length = 0
        while length < self._text_cache.length and not self._failed:
            length = _rounded_length(length + 1, self._text_cache.length)
            self._graph(length, 0)

    def logits(self, rows: Sequence[DecodeRow]) -> Tensor | None:
        """Compute a step: [rows, vocabulary] in the order of ``rows``. None if steps cannot be captured."""
        if self._failed:
            return None
        self._inputs.copy_(torch.tensor(self._columns(rows)))
        length = _rounded_length(max(row.position for row in rows) + 1, self._text_cache.length)
        images = max((row.high for row in rows if row.has_images), default=0)
        step = self._graph(length, _rounded_length(images, self._image_cache.length) if images else 0)
        return None if step is None else step()[torch.tensor([row.slot for row in rows], device=self._like.device)]

    def _graph(self, length: int, images: int) -> StepFunction | None:
        """The captured step of a shape, captured on first use. After a failed capture: None for every shape."""
        shape = length, images
        if shape not in self._graphs:
            try:
                self._graphs[shape] = self._capture(lambda: self._step(*shape))
            except RuntimeError:
                _LOG.exception("CUDA graph capture failed on %s; decode steps run without graphs", self._like.device)
                self._failed = True
                return None
        return self._graphs[shape]

    def _columns(self, rows: Sequence[DecodeRow]) -> list[list[int]]:
        """Inputs of a step by slot: token, position, slot that keys are written to, and the image range and flags."""
        idle = [0, 0, self._slots, 0, 1, 0, 0]
        by_slot = [idle] * self._slots
        for row in rows:
            values = row.token, row.position, row.slot, row.low, row.high, row.has_images, row.after_image
            by_slot[row.slot] = list(values)
        return [list(column) for column in zip(*by_slot, strict=True)]

    def _step(self, length: int, images: int) -> Tensor:
        """Compute one row per slot from the input tensor: [slots, vocabulary]."""
        tokens, positions, target_slots, low, high, has_images, after_image = self._inputs.unbind()
        mask = self._mask(torch.zeros_like(positions), positions + 1, length)
        cache_rows = self._text_cache.row_indices(target_slots, positions)
        context = StepContext((self._text_cache, mask), positions, cache_rows)
        if images:
            context = replace(
                context,
                cross_attention=(self._image_cache, self._mask(low, high, images)),
                has_images=has_images.to(self._like.dtype)[:, None, None],
                after_image=after_image.to(self._like.dtype)[:, None],
            )
        embedded = self._adapter.embed(tokens)
        return self._adapter.logits(self._adapter.forward(embedded, positions, context))

    def _mask(self, low: Tensor, high: Tensor, length: int) -> StepMask:
        positions = torch.arange(length, device=low.device)
        hidden = (positions < low[:, None]) | (positions >= high[:, None])
        mask = self._like.new_zeros(self._slots, length).masked_fill(hidden, -torch.inf)
        decode = DecodeMask(self._slots, slice(0, self._slots), self._slot_rows, length, mask, mask[:, None, None])
        return StepMask(decode, ())


def default_graph_capture(device: torch.device) -> GraphCapture | None:
    """CUDA graph capture on a GPU; None on a CPU, where launching costs next to nothing."""
    return CudaGraphCapturer() if device.type == "cuda" else None


class CudaGraphCapturer:
    """Captures CUDA graphs that share one memory pool: a step's output is valid until the next step of any shape."""

    def __init__(self) -> None:
        self._pool = _CUDA.graph_pool_handle()

    def __call__(self, step: StepFunction) -> StepFunction:
        """Warm a step up on a side stream, then capture it; other threads may use the GPU meanwhile."""
        warm_up_stream, current_stream = _CUDA.Stream(), _CUDA.current_stream()
        warm_up_stream.wait_stream(current_stream)
        with _CUDA.stream(warm_up_stream):
            for _ in range(_WARM_UPS):
                step()
        current_stream.wait_stream(warm_up_stream)
        graph = _CUDA.CUDAGraph()
        with _CUDA.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = step()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def _rounded_length(length: int, maximum: int) -> int:
    """The next power of two, between ``MIN_LENGTH`` and ``maximum``."""
    return min(max(1 << (length - 1).bit_length(), MIN_LENGTH), maximum)
