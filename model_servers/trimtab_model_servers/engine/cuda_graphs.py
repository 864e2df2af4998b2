"""Steps of those who write, recorded once by shape and replayed: on a GPU, starting a kernel takes longer than it does.

A recorded step has a row for every slot, whoever writes. Rows of those who do not write are computed in vain: their
keys and values go to a slot that is nobody's, and nobody reads what they say. It looks at the first positions of each
slot, as many as the longest needs, rounded up to a power of two, so that there are few shapes.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from trimtab_model_servers.engine.attention import StepContext
from trimtab_model_servers.engine.attention_masks import DecodeTokens, StepMask
from trimtab_model_servers.engine.kv_cache import KvCache
from trimtab_model_servers.engine.model_adapters import ModelAdapter

LEAST_LONGEST: Final = 256
_WARM_UPS: Final = 2
_CUDA: Final[Any] = torch.cuda  # some of it has no types
_LOG = logging.getLogger(__name__)

Step = Callable[[], Tensor]
Recorder = Callable[[Step], Step]
"""Makes of a step one that computes the same again, from what its inputs hold by then."""


@dataclass(frozen=True, slots=True)
class Row:
    """One who writes: the token to compute, where it stands in which slot, and what it sees of its images.

    Attributes:
        low: the first image token it sees, in a model that attends across.
        high: one beyond the last.
        sighted: whether it has images.
        behind: whether it stands at or behind one of them.
    """

    slot: int
    token: int
    position: int
    low: int = 0
    high: int = 1
    sighted: bool = False
    behind: bool = False


class CudaGraphPool:
    """Recorded steps over the stores of text and of images, of which the last slot, beyond ``slots``, is nobody's."""

    def __init__(
        self, family: ModelAdapter, stores: tuple[KvCache, KvCache], slots: int, like: Tensor, recorder: Recorder
    ) -> None:
        self._family, (self._own, self._across), self._slots = family, stores, slots
        self._record = recorder
        self._like = like
        self._told = torch.zeros(7, slots, dtype=torch.int64, device=like.device)
        self._every = torch.arange(slots, device=like.device)
        self._recorded: dict[tuple[int, int], Step] = {}
        self._failed = False

    @torch.inference_mode()
    def prepare(self) -> None:
        """Record all steps without images, so that no caller waits for it; those about images are when first asked."""
        self._told.copy_(torch.tensor(self._columns([])))
        longest = 0
        while longest < self._own.length and not self._failed:
            longest = _room(longest + 1, self._own.length)
            self._of_shape(longest, 0)

    def logits(self, rows: Sequence[Row]) -> Tensor | None:
        """Compute a step of ``rows``; [rows, vocabulary] as they are ordered. None where steps cannot be recorded."""
        if self._failed:
            return None
        self._told.copy_(torch.tensor(self._columns(rows)))
        longest = _room(max(row.position for row in rows) + 1, self._own.length)
        images = max((row.high for row in rows if row.sighted), default=0)
        step = self._of_shape(longest, _room(images, self._across.length) if images else 0)
        return None if step is None else step()[torch.tensor([row.slot for row in rows], device=self._like.device)]

    def _of_shape(self, longest: int, images: int) -> Step | None:
        """The recorded step; the first of its shape is recorded now. None from then on where one cannot be."""
        shape = longest, images
        if shape not in self._recorded:
            try:
                self._recorded[shape] = self._record(lambda: self._step(*shape))
            except RuntimeError:
                _LOG.exception("a step of this model cannot be recorded on %s: each is started anew", self._like.device)
                self._failed = True
                return None
        return self._recorded[shape]

    def _columns(self, rows: Sequence[Row]) -> list[list[int]]:
        """What a step is told: of each slot the token, its position, the slot its keys go to, and what it sees."""
        idle = [0, 0, self._slots, 0, 1, 0, 0]
        by_slot = [idle] * self._slots
        for row in rows:
            by_slot[row.slot] = [row.token, row.position, row.slot, row.low, row.high, row.sighted, row.behind]
        return [list(column) for column in zip(*by_slot, strict=True)]

    def _step(self, longest: int, images: int) -> Tensor:
        """Compute a row for every slot from what it is told; [slots, vocabulary]."""
        tokens, positions, keys_to, low, high, sighted, behind = self._told.unbind()
        sight = self._sight(torch.zeros_like(positions), positions + 1, longest)
        context = StepContext((self._own, sight), positions, self._own.rows(keys_to, positions))
        if images:
            context = replace(
                context,
                across=(self._across, self._sight(low, high, images)),
                sighted=sighted.to(self._like.dtype)[:, None, None],
                sees_images=behind.to(self._like.dtype)[:, None],
            )
        embedded = self._family.embed(tokens)
        return self._family.logits(self._family.forward(embedded, positions, context))

    def _sight(self, low: Tensor, high: Tensor, longest: int) -> StepMask:
        places = torch.arange(longest, device=low.device)
        hidden = (places < low[:, None]) | (places >= high[:, None])
        room = self._like.new_zeros(self._slots, longest).masked_fill(hidden, -torch.inf)
        single = DecodeTokens(self._slots, slice(0, self._slots), self._every, longest, room, room[:, None, None])
        return StepMask(single, ())


def recorder_of(device: torch.device) -> Recorder | None:
    """How steps are recorded on a device; None where starting what they do takes no time to speak of."""
    return CudaGraphCapturer() if device.type == "cuda" else None


class CudaGraphCapturer:
    """Records as CUDA graphs, which share their memory: what a step made lasts until the next one of any shape."""

    def __init__(self) -> None:
        self._pool = _CUDA.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """Run a step until all it needs is there, then record it; other threads may use the GPU meanwhile."""
        aside, now = _CUDA.Stream(), _CUDA.current_stream()
        aside.wait_stream(now)
        with _CUDA.stream(aside):
            for _ in range(_WARM_UPS):
                step()
        now.wait_stream(aside)
        graph = _CUDA.CUDAGraph()
        with _CUDA.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            made = step()

        def replay() -> Tensor:
            graph.replay()
            return made

        return replay


def _room(wanted: int, most: int) -> int:
    """The power of two that holds ``wanted``, within what there is."""
    return min(max(1 << (wanted - 1).bit_length(), LEAST_LONGEST), most)
