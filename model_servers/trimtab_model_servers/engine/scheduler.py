"""Which tokens of which requests the next step computes. Pure: no torch, no clock.

Every running request that has its prompt computed writes one token a step; what is left of the step's tokens goes to
prompts, in chunks, those first whose answers are due first. Words alone wait behind nobody's images: up to half of a
step goes to prompts without images before any other; and where that half holds all of them, two of three steps are
theirs alone, since a first word comes only at the end of its whole step. While such prompts come, steps that read
images are short too: who comes next waits for the one under way, and who is read in it for its end. A request is
admitted when a slot is free that holds its whole prompt and all it may write, so that none is ever pushed out.
Prompts are computed up to the first image that is still encoded and lies in no prefix taken over (in a model that
attends across: not before all are there).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from trimtab_model_servers.engine.kv_slots import KvSlotManager, SlotLease
from trimtab_model_servers.engine.request import EngineBusy, Image, PositionKeys, Request, RequestError, position_keys

WORDS_REMEMBERED_STEPS = 128
"""For so many steps after one that read a prompt without images, the next such prompt is expected."""
IMAGES_SHARE, IMAGES_LEAST_TOKENS = 4, 32
"""Of a step's tokens, prompts with images get at most the fourth part while prompts without are expected, but no less
than a few: those take hardly longer than none."""
MOST_STEPS_OF_WORDS = 2
"""So many steps in a row are those prompts' alone; who comes during one does not wait for images in the next."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine holds.

    Attributes:
        slots: requests running at once.
        slot_tokens: most positions of one request, prompt and answer together.
        step_tokens: most tokens a step computes.
        waiting: most requests that wait for a slot.
        image_tokens: most image tokens of one request, in a model that attends across; 0 in others.
    """

    slots: int = 16
    slot_tokens: int = 1024
    step_tokens: int = 512
    waiting: int = 1024
    image_tokens: int = 0

    def __post_init__(self) -> None:
        if self.step_tokens <= self.slots:
            raise ValueError(
                f"step_tokens is {self.step_tokens}; should be above slots, {self.slots}: each may write one"
            )


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A run of positions of one request that a step computes; ``writes`` when a token follows the last of them."""

    request_id: str
    slot: int
    start: int
    tokens: tuple[int, ...]
    writes: bool


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that takes its slot in this step, before anything is computed."""

    request: Request
    lease: SlotLease


@dataclass(frozen=True, slots=True)
class Step:
    """What to compute: who comes in, one token each of those who write, and chunks of prompts."""

    admissions: tuple[Admission, ...]
    decodes: tuple[PrefillChunk, ...]
    chunks: tuple[PrefillChunk, ...]

    @property
    def parts(self) -> tuple[PrefillChunk, ...]:
        """All that is computed, those who write first."""
        return self.decodes + self.chunks


@dataclass(slots=True)
class _Running:
    """A request under way."""

    request: Request
    order: int
    keys: PositionKeys
    tokens: list[int]
    ready: list[bool]
    lease: SlotLease | None = None
    computed: int = 0
    cached: int = 0

    @property
    def prompt(self) -> int:
        return len(self.request.tokens)

    @property
    def written(self) -> int:
        return len(self.tokens) - self.prompt


class Scheduler:
    """Holds requests from ``submit`` to ``finish``; ``next_step`` plans, ``computed`` and ``wrote`` report back."""

    def __init__(self, limits: Limits, *, across: bool = False, share_prefixes: bool = True) -> None:
        self.limits = limits
        self._across = across
        self._slots = KvSlotManager(limits.slots, limits.slot_tokens, share_prefixes=share_prefixes)
        self._running: dict[str, _Running] = {}
        self._waiting: dict[str, _Running] = {}
        self._submitted = 0
        self._steps_of_words = 0
        """How many steps, the last ones, left prompts with images out for those without."""
        self._steps_since_words = WORDS_REMEMBERED_STEPS

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
        """Slots that are given away."""
        return self._slots.busy

    @property
    def pending_tokens(self) -> int:
        """Tokens of prompts that are still to be computed."""
        return sum(max(one.prompt - one.computed, 0) for one in self._all())

    def submit(self, request: Request, ready: tuple[bool, ...] = ()) -> None:
        """Take a request in; ``ready`` tells which of its images are encoded (all, when left out).

        Raises:
            RequestError: it can never fit, or its id is in use.
            EngineBusy: as many wait already as may.
        """
        self._require_fit(request)
        if len(self._waiting) >= self.limits.waiting:
            raise EngineBusy(f"{len(self._waiting)} requests wait already, as many as may; try again later")
        ready = ready or (True,) * len(request.images)
        keys = position_keys(request.tokens, request.images)
        self._waiting[request.id] = _Running(request, self._submitted, keys, list(request.tokens), list(ready))
        self._submitted += 1

    def image_ready(self, request_id: str, image: int) -> None:
        """Note that an image of a request is encoded; one that is gone meanwhile is none of ours."""
        found = self._running.get(request_id) or self._waiting.get(request_id)
        if found is not None:
            found.ready[image] = True

    def next_step(self) -> Step | None:
        """Plan the next step; None when nothing can be computed now."""
        admissions = tuple(self._admit())
        ordered = sorted(self._running.values(), key=_urgency)
        decodes = tuple(_chunk(one, one.computed, len(one.tokens)) for one in ordered if one.written)
        chunks = self._prompts([one for one in ordered if not one.written], self.limits.step_tokens - len(decodes))
        if not admissions and not decodes and not chunks:
            return None
        return Step(admissions, decodes, chunks)

    def computed(self, part: PrefillChunk) -> None:
        """Note that a part of a step was computed."""
        one = self._running[part.request_id]
        one.computed = part.start + len(part.tokens)
        self._slots.wrote(part.slot, one.keys[part.start : one.computed] if part.start < one.prompt else part.tokens)

    def wrote(self, request_id: str, token: int) -> int:
        """Note that a request wrote a token; return how many it has written."""
        one = self._running[request_id]
        one.tokens.append(token)
        return one.written

    def usage(self, request_id: str) -> tuple[int, int]:
        """How many tokens a request has written, and how many of its prompt were not computed again."""
        one = self._running.get(request_id) or self._waiting[request_id]
        return one.written, one.cached

    def slot_of(self, request_id: str) -> int | None:
        """The slot of a request; None while it waits."""
        one = self._running.get(request_id)
        return one.lease.slot if one is not None and one.lease is not None else None

    def finish(self, request_id: str, *, forget: bool = False) -> bool:
        """Let go of a request, whatever its state, and of all it holds; False when it is gone already."""
        one = self._waiting.pop(request_id, None) or self._running.pop(request_id, None)
        if one is not None and one.lease is not None:
            self._slots.free(one.lease.slot, forget=forget)
        return one is not None

    def knows(self, request_id: str) -> bool:
        """Whether a request is in flight."""
        return request_id in self._running or request_id in self._waiting

    def _prompts(self, reading: list[_Running], room: int) -> tuple[PrefillChunk, ...]:
        """How far each prompt gets in a step: those without images share the first half of the room, all the rest.

        Where those without images need no more than that half, they have two of three steps to themselves: these are
        short. The third is short too, and any other where more of them are expected.
        """
        words, half = [one for one in reading if not one.request.images], room // 2
        wanted = sum(one.prompt - one.computed for one in words)
        self._steps_since_words = 0 if words else self._steps_since_words + 1
        fit = wanted <= half
        alone = bool(words) and fit and len(words) < len(reading) and self._steps_of_words < MOST_STEPS_OF_WORDS
        self._steps_of_words = self._steps_of_words + 1 if alone else 0
        if alone:
            reading = words
        elif fit and self._steps_since_words < WORDS_REMEMBERED_STEPS:
            room = min(room, wanted + max(self.limits.step_tokens // IMAGES_SHARE, IMAGES_LEAST_TOKENS))
        reached = [one.computed for one in reading]
        for most, only_words in ((half, True), (room, False)):
            left = most - sum(reached) + sum(one.computed for one in reading)
            for place, one in enumerate(reading):
                if not (only_words and one.request.images):
                    more = max(min(self._usable(one) - reached[place], left), 0)
                    reached[place] += more
                    left -= more
        ends = zip(reading, reached, strict=True)
        return tuple(_chunk(one, one.computed, end) for one, end in ends if end > one.computed)

    def _admit(self) -> Iterator[Admission]:
        for one in sorted(self._waiting.values(), key=_urgency):
            usable = self._usable(one)
            if usable == 0:
                continue  # would hold a slot only to wait in it
            space = _space(one.request, across=self._across)
            lease = self._slots.take(one.keys, space)
            if lease is None and usable < one.prompt:
                continue  # nobody makes room for who would soon wait himself
            if lease is None and self._make_room():
                lease = self._slots.take(one.keys, space)
            if lease is None:
                return
            one.lease = lease
            one.computed = one.cached = lease.reused
            del self._waiting[one.request.id]
            self._running[one.request.id] = one
            yield Admission(one.request, lease)

    def _make_room(self) -> bool:
        """Take the slot back from who holds it only to wait for an image; False where nobody does.

        What it computed stays in the slot until that is given away. It comes in again as others do.
        """
        idle = [one for one in self._running.values() if self._usable(one) <= one.computed < one.prompt]
        if not idle:
            return False
        one = max(idle, key=_urgency)
        if one.lease is not None:
            self._slots.free(one.lease.slot)
        one.lease, one.computed, one.cached = None, 0, 0
        del self._running[one.request.id]
        self._waiting[one.request.id] = one
        return True

    def _usable(self, one: _Running) -> int:
        """How far the prompt can be computed with the images that are there; those it has behind it are not needed."""
        for image, ready in zip(one.request.images, one.ready, strict=True):
            if not ready and self._across:
                return 0
            if not ready and image.end > one.computed:
                return image.start
        return one.prompt

    def _require_fit(self, request: Request) -> None:
        if self.knows(request.id):
            raise RequestError(f"a request {request.id!r} is in flight; its id should be its own")
        wanted = len(request.tokens) + request.max_new_tokens
        if wanted > self.limits.slot_tokens:
            raise RequestError(
                f"the prompt's {len(request.tokens)} tokens and {request.max_new_tokens} new ones are {wanted}; "
                f"should be at most {self.limits.slot_tokens} together"
            )
        seen = _image_tokens(request.images)
        if self._across and seen > self.limits.image_tokens:
            raise RequestError(f"the images are {seen} tokens; should be at most {self.limits.image_tokens} together")

    def _all(self) -> Iterator[_Running]:
        yield from self._running.values()
        yield from self._waiting.values()


def _urgency(one: _Running) -> tuple[float, int]:
    return one.request.due_at, one.order


def _chunk(one: _Running, start: int, end: int) -> PrefillChunk:
    if one.lease is None:
        raise RuntimeError(f"request {one.request.id!r} has no slot")
    return PrefillChunk(one.request.id, one.lease.slot, start, tuple(one.tokens[start:end]), end == len(one.tokens))


def _space(request: Request, *, across: bool) -> str:
    """Who may share prefixes. Where early text attends to all images too, only prompts with the very same ones."""
    images = "|".join(f"{image.content}:{image.rows}@{image.start}" for image in request.images) if across else ""
    return f"{len(request.tenant)}:{request.tenant}{images}"


def _image_tokens(images: tuple[Image, ...]) -> int:
    return sum(image.rows for image in images)
