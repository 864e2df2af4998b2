"""Instances under requests, moment by moment: a monolith's, or pools of encoders and of text instances.

An instance does one job after another: a whole request (monolith), an image, or a prefill. Who gets the next job of a
pool, and which job of an instance comes next, is what the paper's steps change.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Final

from benchmarks.modserve.paper import (
    IMAGE_GPUS,
    IMAGE_PROMPT_TOKENS,
    MEDIAN_TEXT_TOKENS,
    MONOLITH_GPUS,
    TEXT_GPUS,
    Profile,
)
from trimtab_adapter.simulation.event_queue import EventQueue
from trimtab_loadtester.multimodal.traffic import Request

SLO_FACTOR: Final = 20.0
START_SECONDS: Final = 60.0
"""From the decision until a new instance serves, in units of the profile."""
PATIENCE: Final = 10.0
"""How many promises long a request is waited for at the end."""


@dataclass(frozen=True, slots=True)
class System:
    """What of the paper is turned on."""

    name: str
    decoupled: bool
    by_slack: bool = False
    by_tokens: bool = False
    chunk_tokens: int = 0


MONOLITH: Final = System("monolith", decoupled=False)
DECOUPLED: Final = System("decoupled", decoupled=True)
SCHEDULED: Final = System("+ scheduling", decoupled=True, by_slack=True)
ROUTED: Final = System("+ routing", decoupled=True, by_slack=True, by_tokens=True)
OURS: Final = System("ours", decoupled=True, by_slack=True, by_tokens=True, chunk_tokens=512)
"""ModServe's steps, prefill in chunks between which the most urgent request is chosen anew, and the layout sought."""
ALERT_MONOLITH: Final = System("monolith, scheduled and routed", decoupled=False, by_slack=True, by_tokens=True)


Job = tuple[float, int, float, int, Callable[[], None]]
"""What comes first, the order of coming, seconds, tokens, and whom to tell."""


@dataclass(slots=True)
class Instance:
    """A queue and one thing at a time."""

    queue: list[Job] = field(default_factory=list)
    busy: bool = False
    pending_tokens: int = 0


class Pool:
    """Instances of one kind, each with a queue of its own."""

    def __init__(
        self, agenda: EventQueue, size: int, gpus: int, *, by_slack: bool, by_tokens: bool, chunk_seconds: float = inf
    ) -> None:
        self.instances = [Instance() for _ in range(size)]
        self.gpu_seconds = 0.0
        self.gpus = gpus
        self._agenda, self._chunk_seconds = agenda, chunk_seconds
        self._by_slack, self._by_tokens = by_slack, by_tokens
        self._starting = 0
        self._sent = 0
        self._counted_at = 0.0

    def send(self, tokens: int, seconds: float, latest_start: float, done: Callable[[], None]) -> None:
        """Give a job to an instance: to the one with the fewest pending tokens, or to the next in turn."""
        self._sent += 1
        if self._by_tokens:
            chosen = min(self.instances, key=lambda one: one.pending_tokens)
        else:
            chosen = self.instances[self._sent % len(self.instances)]
        chosen.pending_tokens += tokens
        key = latest_start if self._by_slack else float(self._sent)
        heapq.heappush(chosen.queue, (key, self._sent, seconds, tokens, done))
        if not chosen.busy:
            self._next(chosen)

    def _next(self, instance: Instance) -> None:
        instance.busy = bool(instance.queue)
        if not instance.queue:
            return
        key, order, seconds, tokens, done = heapq.heappop(instance.queue)
        if seconds > self._chunk_seconds:
            rest = (key, order, seconds - self._chunk_seconds, tokens, done)
            self._agenda.call_at(self._agenda.now + self._chunk_seconds, partial(self._goes_on, instance, rest))
        else:
            self._agenda.call_at(self._agenda.now + seconds, partial(self._ended, instance, tokens, done))

    def _goes_on(self, instance: Instance, rest: Job) -> None:
        heapq.heappush(instance.queue, rest)
        self._next(instance)

    def _ended(self, instance: Instance, tokens: int, done: Callable[[], None]) -> None:
        instance.pending_tokens -= tokens
        done()
        self._next(instance)

    @property
    def wanted(self) -> int:
        """Instances that serve or will."""
        return len(self.instances) + self._starting

    def resize(self, size: int) -> None:
        """Start instances, which serve after a while; or let go of those with the least to do, who end their work."""
        self.count()
        more = size - self.wanted
        self._starting += max(0, more)
        for _ in range(more):
            self._agenda.call_at(self._agenda.now + START_SECONDS, self._joins)
        if more < 0:
            kept = len(self.instances) + max(more, 1 - len(self.instances))
            self.instances = sorted(self.instances, key=lambda one: -one.pending_tokens)[:kept]

    def _joins(self) -> None:
        self.count()
        self._starting -= 1
        self.instances.append(Instance())

    def count(self) -> None:
        """Add up what was paid for until now; those that start are paid for."""
        self.gpu_seconds += (self._agenda.now - self._counted_at) * self.wanted * self.gpus
        self._counted_at = self._agenda.now


def promise(profile: Profile, request: Request, factor: float = SLO_FACTOR) -> float:
    """Seconds promised to the first token: so many times what one of its kind takes alone (section 5.1)."""
    if request.images:
        return factor * profile.alone(IMAGE_PROMPT_TOKENS, 1)
    return factor * profile.alone(MEDIAN_TEXT_TOKENS, 0)


@dataclass(frozen=True, slots=True)
class Answered:
    """A request and its seconds to the first token; infinite where it was never reached."""

    request: Request
    seconds: float
    promised: float

    @property
    def kept(self) -> bool:
        """Whether the promise was kept."""
        return self.seconds <= self.promised


class Cluster:
    """A system's instances, and what became of the requests so far."""

    def __init__(self, system: System, profile: Profile, sizes: tuple[int, int], factor: float = SLO_FACTOR) -> None:
        self.agenda = EventQueue()
        self.answers: list[Answered] = []
        self.lately: deque[tuple[float, Answered]] = deque()
        self.system, self.profile, self._factor = system, profile, factor
        turned = {"by_slack": system.by_slack, "by_tokens": system.by_tokens}
        images, texts = sizes
        self.images = Pool(self.agenda, images if system.decoupled else 0, IMAGE_GPUS, **turned)
        chunk = system.chunk_tokens * profile.prefill_token or inf
        gpus = TEXT_GPUS if system.decoupled else MONOLITH_GPUS
        self.texts = Pool(self.agenda, texts, gpus, chunk_seconds=chunk, **turned)

    def run(self, asked: Sequence[Request]) -> list[Answered]:
        """Serve all requests; return what became of them, in the order of their arrival."""
        for request in asked:
            self.agenda.call_at(request.arrival_seconds, partial(self._arrives, request))
        longest = max((promise(self.profile, one, self._factor) for one in asked), default=0.0)
        self.agenda.run((asked[-1].arrival_seconds if asked else 0.0) + PATIENCE * longest)
        self.images.count()
        self.texts.count()
        met = {id(one.request): one for one in self.answers}
        return [met.get(id(one)) or Answered(one, inf, promise(self.profile, one, self._factor)) for one in asked]

    def _arrives(self, request: Request) -> None:
        profile, by = self.profile, request.arrival_seconds + promise(self.profile, request, self._factor)
        first = partial(self._answered, request)
        if not request.images or not self.system.decoupled:
            self.agenda.call_at(
                request.arrival_seconds + (profile.preprocess if request.images else 0.0),
                partial(self._reads, request, by, first),
            )
            return
        missing = [request.images]
        latest = by - profile.encode_alone - profile.transfer - profile.prefill(request.text_tokens, request.images)

        def encoded() -> None:
            missing[0] -= 1
            if not missing[0]:
                self.agenda.call_at(self.agenda.now + profile.transfer, partial(self._reads, request, by, first))

        def encode() -> None:
            for _ in range(request.images):
                self.images.send(profile.image_tokens, profile.encode_alone, latest, encoded)

        self.agenda.call_at(request.arrival_seconds + profile.preprocess, encode)

    def _reads(self, request: Request, by: float, first: Callable[[], None]) -> None:
        seconds = self.profile.prefill(request.text_tokens, request.images)
        tokens = self.profile.prompt_tokens(request.text_tokens, request.images)
        if not self.system.decoupled:
            seconds += request.images * self.profile.encode
            tokens = request.text_tokens + request.images * self.profile.image_tokens
        self.texts.send(tokens, seconds, by - seconds, first)

    def _answered(self, request: Request) -> None:
        answered = Answered(
            request, self.agenda.now - request.arrival_seconds, promise(self.profile, request, self._factor)
        )
        self.answers.append(answered)
        self.lately.append((self.agenda.now, answered))
