"""Continuous-batching scheduler: the tokens that the next step computes. It uses neither torch nor a clock.

Every running request past its prefill decodes one token a step; the rest of the step's token budget goes to prefill
chunks, earliest deadline first. Text-only prompts are not delayed by images: up to half of the budget is reserved for
them. If that half holds all of them, two of three steps contain only text, because a first token is produced at the end
of its step. While text-only prompts keep arriving, steps with images are kept short too, because a new prompt waits for
the step in progress. A request is admitted when a free slot can hold its whole prompt and output, so that none is ever
preempted for memory. A prompt is computed up to the first image that is neither encoded nor part of a reused prefix
(with cross-attention: not before all images are encoded).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from trimtab_model_servers.engine.kv_slots import KvSlotManager, SlotLease
from trimtab_model_servers.engine.request import EngineBusy, PositionKeys, Request, RequestError, position_keys

TEXT_ONLY_MEMORY_STEPS = 128
"""Steps after a text-only prefill during which another text-only prompt is expected."""
IMAGE_BUDGET_DIVISOR, MIN_IMAGE_BUDGET_TOKENS = 4, 32
"""While text-only prompts are expected, prompts with images get this fraction of a step's tokens, but at least the
minimum, which costs hardly more time than none."""
MAX_TEXT_ONLY_STEPS = 2
"""Consecutive steps that text-only prompts may have to themselves."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Capacity of the engine."""

    slots: int = 16
    slot_tokens: int = 1024
    """Positions of one request, prompt and output together."""
    step_tokens: int = 512
    max_waiting: int = 1024
    image_tokens: int = 0
    """Image tokens of one request, with cross-attention; 0 for other models."""

    def __post_init__(self) -> None:
        if self.step_tokens <= self.slots:
            raise ValueError(
                f"step_tokens is {self.step_tokens}; should be above slots, {self.slots}: each may decode a token"
            )


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Consecutive tokens of one request that a step computes: a prefill chunk, or one decoded token."""

    request_id: str
    slot: int
    start: int
    tokens: tuple[int, ...]
    samples: bool
    """Whether the last token's logits give the next token."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that gets its slot in this step."""

    request: Request
    lease: SlotLease


@dataclass(frozen=True, slots=True)
class Step:
    """One step: requests to admit, then one token per decoding request and the prefill chunks."""

    admissions: tuple[Admission, ...]
    decodes: tuple[ScheduledChunk, ...]
    prefills: tuple[ScheduledChunk, ...]

    @property
    def chunks(self) -> tuple[ScheduledChunk, ...]:
        return self.decodes + self.prefills


@dataclass(slots=True)
class _InFlight:
    request: Request
    arrival: int
    keys: PositionKeys
    tokens: list[int]
    """Prompt and generated tokens."""
    encoded: list[bool]
    """By image."""
    lease: SlotLease | None = None
    computed: int = 0
    reused: int = 0

    @property
    def prompt_length(self) -> int:
        return len(self.request.tokens)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def remaining_prompt(self) -> int:
        return self.prompt_length - self.computed


class Scheduler:
    """Queue and running set: ``next_step`` plans, ``record_…`` report what the model runner did."""

    def __init__(self, limits: EngineLimits, *, cross_attention: bool = False, share_prefixes: bool = True) -> None:
        self.limits = limits
        self._cross_attention = cross_attention
        self._slots = KvSlotManager(limits.slots, limits.slot_tokens, share_prefixes=share_prefixes)
        self._running: dict[str, _InFlight] = {}
        self._waiting: dict[str, _InFlight] = {}
        self._submitted = 0
        self._text_only_steps = 0
        """Consecutive steps, up to now, that left out prompts with images."""
        self._steps_since_text_only = TEXT_ONLY_MEMORY_STEPS

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests with a slot."""
        return len(self._running)

    @property
    def busy_slots(self) -> int:
        return self._slots.busy

    @property
    def pending_tokens(self) -> int:
        return sum(max(entry.remaining_prompt, 0) for entry in (*self._running.values(), *self._waiting.values()))

    def submit(self, request: Request, encoded: tuple[bool, ...] = ()) -> None:
        """Enqueue a request; ``encoded`` is by image (default: all are); raises RequestError or EngineBusy."""
        self._require_fit(request)
        if len(self._waiting) >= self.limits.max_waiting:
            raise EngineBusy(f"{len(self._waiting)} requests wait already, the maximum; try again later")
        encoded = encoded or (True,) * len(request.images)
        keys = position_keys(request.tokens, request.images)
        self._waiting[request.id] = _InFlight(request, self._submitted, keys, list(request.tokens), list(encoded))
        self._submitted += 1

    def mark_image_ready(self, request_id: str, image: int) -> None:
        """Record that an image is encoded; ignored if the request has ended."""
        entry = self._running.get(request_id) or self._waiting.get(request_id)
        if entry is not None:
            entry.encoded[image] = True

    def next_step(self) -> Step | None:
        """Plan the next step; None if there is nothing to compute."""
        admissions = tuple(self._admit())
        ordered = sorted(self._running.values(), key=_priority)
        decodes = tuple(_chunk(entry, entry.computed, len(entry.tokens)) for entry in ordered if entry.generated)
        prompts = [entry for entry in ordered if not entry.generated]
        prefills = self._prefills(prompts, self.limits.step_tokens - len(decodes))
        if not admissions and not decodes and not prefills:
            return None
        return Step(admissions, decodes, prefills)

    def record_computed(self, chunk: ScheduledChunk) -> None:
        entry = self._running[chunk.request_id]
        entry.computed = chunk.start + len(chunk.tokens)
        in_prompt = chunk.start < entry.prompt_length
        self._slots.record(chunk.slot, entry.keys[chunk.start : entry.computed] if in_prompt else chunk.tokens)

    def record_token(self, request_id: str, token: int) -> int:
        """Record a generated token; return the number of tokens generated."""
        entry = self._running[request_id]
        entry.tokens.append(token)
        return entry.generated

    def usage(self, request_id: str) -> tuple[int, int]:
        """Tokens that a request generated, and prompt tokens that it reused."""
        entry = self._running.get(request_id) or self._waiting[request_id]
        return entry.generated, entry.reused

    def slot_of(self, request_id: str) -> int | None:
        entry = self._running.get(request_id)
        return entry.lease.slot if entry is not None and entry.lease is not None else None

    def finish(self, request_id: str, *, invalidate_prefix: bool = False) -> bool:
        """Remove a request, in any state, and release its slot; False if it has ended already."""
        entry = self._waiting.pop(request_id, None) or self._running.pop(request_id, None)
        if entry is not None and entry.lease is not None:
            self._slots.release(entry.lease.slot, invalidate_prefix=invalidate_prefix)
        return entry is not None

    def is_in_flight(self, request_id: str) -> bool:
        return request_id in self._running or request_id in self._waiting

    def _prefills(self, prompts: list[_InFlight], budget: int) -> tuple[ScheduledChunk, ...]:
        """Divide a step's token budget: text-only prompts share the first half of it, all prompts the rest.

        If that half holds all text-only prompts, they have two of three steps to themselves, which are short. The third
        step is short too, and so is any step while more text-only prompts are expected.
        """
        text_only, half = [entry for entry in prompts if not entry.request.images], budget // 2
        text_tokens = sum(entry.remaining_prompt for entry in text_only)
        self._steps_since_text_only = 0 if text_only else self._steps_since_text_only + 1
        fits = text_tokens <= half
        leave_out_images = (
            bool(text_only) and fits and len(text_only) < len(prompts) and self._text_only_steps < MAX_TEXT_ONLY_STEPS
        )
        self._text_only_steps = self._text_only_steps + 1 if leave_out_images else 0
        if leave_out_images:
            prompts = text_only
        elif fits and self._steps_since_text_only < TEXT_ONLY_MEMORY_STEPS:
            image_budget = max(self.limits.step_tokens // IMAGE_BUDGET_DIVISOR, MIN_IMAGE_BUDGET_TOKENS)
            budget = min(budget, text_tokens + image_budget)
        ends = [entry.computed for entry in prompts]
        for tokens, skip_images in ((half, True), (budget, False)):
            remaining = tokens - sum(ends) + sum(entry.computed for entry in prompts)
            for number, entry in enumerate(prompts):
                if not (skip_images and entry.request.images):
                    count = max(min(self._computable(entry) - ends[number], remaining), 0)
                    ends[number] += count
                    remaining -= count
        chunks = zip(prompts, ends, strict=True)
        return tuple(_chunk(entry, entry.computed, end) for entry, end in chunks if end > entry.computed)

    def _admit(self) -> Iterator[Admission]:
        for entry in sorted(self._waiting.values(), key=_priority):
            computable = self._computable(entry)
            if computable == 0:
                continue  # it would only wait in the slot
            namespace = _namespace(entry.request, cross_attention=self._cross_attention)
            lease = self._slots.acquire(entry.keys, namespace)
            if lease is None and computable < entry.prompt_length:
                continue  # a request that will soon wait for an image itself displaces no other
            if lease is None and self._release_blocked_slot():
                lease = self._slots.acquire(entry.keys, namespace)
            if lease is None:
                return
            entry.lease = lease
            entry.computed = entry.reused = lease.reused_tokens
            del self._waiting[entry.request.id]
            self._running[entry.request.id] = entry
            yield Admission(entry.request, lease)

    def _release_blocked_slot(self) -> bool:
        """Return a request that waits for an image to the queue; its cached prefix stays. False if there is none."""
        blocked = [
            entry for entry in self._running.values() if self._computable(entry) <= entry.computed < entry.prompt_length
        ]
        if not blocked:
            return False
        entry = max(blocked, key=_priority)
        if entry.lease is not None:
            self._slots.release(entry.lease.slot)
        entry.lease, entry.computed, entry.reused = None, 0, 0
        del self._running[entry.request.id]
        self._waiting[entry.request.id] = entry
        return True

    def _computable(self, entry: _InFlight) -> int:
        """Length of the prompt's prefix that needs no image that is still encoded; computed images are not needed."""
        for image, encoded in zip(entry.request.images, entry.encoded, strict=True):
            if not encoded and self._cross_attention:
                return 0
            if not encoded and image.end > entry.computed:
                return image.start
        return entry.prompt_length

    def _require_fit(self, request: Request) -> None:
        if self.is_in_flight(request.id):
            raise RequestError(f"a request {request.id!r} is in flight; ids must be unique")
        total = len(request.tokens) + request.max_new_tokens
        if total > self.limits.slot_tokens:
            raise RequestError(
                f"the prompt's {len(request.tokens)} tokens and {request.max_new_tokens} new ones are {total}; "
                f"should be at most {self.limits.slot_tokens} together"
            )
        image_tokens = sum(image.rows for image in request.images)
        if self._cross_attention and image_tokens > self.limits.image_tokens:
            raise RequestError(f"the images have {image_tokens} tokens; should be at most {self.limits.image_tokens}")


def _priority(entry: _InFlight) -> tuple[float, int]:
    return entry.request.due_at, entry.arrival


def _chunk(entry: _InFlight, start: int, end: int) -> ScheduledChunk:
    if entry.lease is None:
        raise RuntimeError(f"request {entry.request.id!r} has no slot")
    tokens = tuple(entry.tokens[start:end])
    return ScheduledChunk(entry.request.id, entry.lease.slot, start, tokens, samples=end == len(entry.tokens))


def _namespace(request: Request, *, cross_attention: bool) -> str:
    """Requests that may share prefixes. With cross-attention all text attends to images: they must be equal too."""
    images = ""
    if cross_attention:
        images = "|".join(f"{image.content}:{image.rows}@{image.start}" for image in request.images)
    return f"{len(request.tenant)}:{request.tenant}{images}"
