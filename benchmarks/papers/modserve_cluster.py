"""Simulated cluster of ModServe's evaluation: instances of a monolith, or pools of encoders and of text instances.

An instance does one job after another: a whole request (monolith), an image, or a prefill. The paper's steps change
which instance of a pool gets the next job, and which job of an instance comes next.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Final

import numpy as np

from benchmarks.papers.modserve_model import (
    GPUS,
    IMAGE_GPUS,
    IMAGE_PROMPT_TOKENS,
    IMAGES,
    MEDIAN_TEXT_TOKENS,
    MONOLITH_GPUS,
    MONOLITHS,
    TEXT_GPUS,
    TEXTS,
    Profile,
)
from trimtab_adapter.simulation.event_queue import EventQueue
from trimtab_loadtester.multimodal.traffic import Request

SLO_FACTOR: Final = 20.0
START_SECONDS: Final = 60.0
"""From the decision until a new instance serves, in units of the profile."""
PATIENCE: Final = 10.0
"""How many SLOs long requests are waited for at the end."""


@dataclass(frozen=True, slots=True)
class System:
    """The steps of the paper that are turned on."""

    name: str
    decoupled: bool
    by_slack: bool = False
    by_tokens: bool = False
    chunk_tokens: int = 0

    def sizes(self, gpus: int = GPUS, texts: int | None = None) -> tuple[int, int]:
        """Return image and text instances as the paper divides them, or with `texts` text instances of 128 GPUs."""
        if not self.decoupled:
            return 0, MONOLITHS * gpus // GPUS
        images = IMAGES if texts is None else (GPUS - texts * TEXT_GPUS) // IMAGE_GPUS
        return max(1, images * gpus // GPUS), max(1, (TEXTS if texts is None else texts) * gpus // GPUS)


MONOLITH: Final = System("monolith", decoupled=False)
DECOUPLED: Final = System("decoupled", decoupled=True)
SCHEDULED: Final = System("+ scheduling", decoupled=True, by_slack=True)
ROUTED: Final = System("+ routing", decoupled=True, by_slack=True, by_tokens=True)
OURS: Final = System("ours", decoupled=True, by_slack=True, by_tokens=True, chunk_tokens=512)
"""ModServe's steps, prefill in chunks between which the most urgent request is chosen again, and a searched split."""
ALERT_MONOLITH: Final = System("monolith, scheduled and routed", decoupled=False, by_slack=True, by_tokens=True)

Job = tuple[float, int, float, int, Callable[[], None]]
"""Priority, order of arrival, seconds, tokens, and what to call at its end."""


@dataclass(slots=True)
class Instance:
    """A queue and the job that runs."""

    queue: list[Job] = field(default_factory=list)
    busy: bool = False
    pending_tokens: int = 0


class Pool:
    """Instances of one kind, each with a queue of its own."""

    def __init__(self, events: EventQueue, size: int, gpus: int, system: System, *, chunk_seconds: float = inf) -> None:
        self.instances = [Instance() for _ in range(size)]
        self.gpu_seconds = 0.0
        self.gpus = gpus
        self._events, self._system, self._chunk_seconds = events, system, chunk_seconds
        self._starting = 0
        self._sent = 0
        self._counted_at = 0.0

    def send(self, tokens: int, seconds: float, latest_start: float, done: Callable[[], None]) -> None:
        """Give a job to an instance: to the one with the fewest pending tokens, or to the next in turn."""
        self._sent += 1
        if self._system.by_tokens:
            chosen = min(self.instances, key=lambda instance: instance.pending_tokens)
        else:
            chosen = self.instances[self._sent % len(self.instances)]
        chosen.pending_tokens += tokens
        priority = latest_start if self._system.by_slack else float(self._sent)
        heapq.heappush(chosen.queue, (priority, self._sent, seconds, tokens, done))
        if not chosen.busy:
            self._start_next(chosen)

    def _start_next(self, instance: Instance) -> None:
        instance.busy = bool(instance.queue)
        if not instance.queue:
            return
        priority, order, seconds, tokens, done = heapq.heappop(instance.queue)
        if seconds > self._chunk_seconds:
            rest = (priority, order, seconds - self._chunk_seconds, tokens, done)
            self._events.call_at(self._events.now + self._chunk_seconds, partial(self._requeue, instance, rest))
        else:
            self._events.call_at(self._events.now + seconds, partial(self._end, instance, tokens, done))

    def _requeue(self, instance: Instance, rest: Job) -> None:
        heapq.heappush(instance.queue, rest)
        self._start_next(instance)

    def _end(self, instance: Instance, tokens: int, done: Callable[[], None]) -> None:
        instance.pending_tokens -= tokens
        done()
        self._start_next(instance)

    @property
    def size(self) -> int:
        """Instances that serve or start."""
        return len(self.instances) + self._starting

    def resize(self, size: int) -> None:
        """Start instances, which serve after a while, or remove those with the least work, which complete it."""
        self.count_gpu_seconds()
        more = size - self.size
        self._starting += max(0, more)
        for _ in range(more):
            self._events.call_at(self._events.now + START_SECONDS, self._add_instance)
        if more < 0:
            kept = len(self.instances) + max(more, 1 - len(self.instances))
            self.instances = sorted(self.instances, key=lambda instance: -instance.pending_tokens)[:kept]

    def _add_instance(self) -> None:
        self.count_gpu_seconds()
        self._starting -= 1
        self.instances.append(Instance())

    def count_gpu_seconds(self) -> None:
        """Add the GPU-seconds until now, including those of starting instances."""
        self.gpu_seconds += (self._events.now - self._counted_at) * self.size * self.gpus
        self._counted_at = self._events.now


def slo_seconds(profile: Profile, request: Request) -> float:
    """Return the SLO of the time to the first token: a multiple of that of such a request alone (section 5.1)."""
    if request.images:
        return SLO_FACTOR * profile.alone(IMAGE_PROMPT_TOKENS, 1)
    return SLO_FACTOR * profile.alone(MEDIAN_TEXT_TOKENS, 0)


@dataclass(frozen=True, slots=True)
class Answer:
    """A request and its seconds to the first token; infinite if it has none."""

    request: Request
    seconds: float
    slo_seconds: float

    @property
    def in_time(self) -> bool:
        return self.seconds <= self.slo_seconds


class Cluster:
    """A system's instances, and the answers so far."""

    def __init__(self, system: System, profile: Profile, sizes: tuple[int, int]) -> None:
        self.events = EventQueue()
        self.answers: list[Answer] = []
        self.recent: deque[Answer] = deque()
        self.system, self.profile = system, profile
        images, texts = sizes
        self.images = Pool(self.events, images if system.decoupled else 0, IMAGE_GPUS, system)
        chunk_seconds = system.chunk_tokens * profile.prefill_token or inf
        gpus = TEXT_GPUS if system.decoupled else MONOLITH_GPUS
        self.texts = Pool(self.events, texts, gpus, system, chunk_seconds=chunk_seconds)

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        """Serve all requests; return their answers in the order of arrival."""
        for request in requests:
            self.events.call_at(request.arrival_seconds, partial(self._arrive, request))
        slos = [slo_seconds(self.profile, request) for request in requests]
        end_seconds = requests[-1].arrival_seconds if requests else 0.0
        self.events.run(end_seconds + PATIENCE * max(slos, default=0.0))
        self.images.count_gpu_seconds()
        self.texts.count_gpu_seconds()
        answers = {id(answer.request): answer for answer in self.answers}
        return [
            answers.get(id(request)) or Answer(request, inf, slo) for request, slo in zip(requests, slos, strict=True)
        ]

    def _arrive(self, request: Request) -> None:
        profile, due = self.profile, request.arrival_seconds + slo_seconds(self.profile, request)
        ready_at = request.arrival_seconds + (profile.preprocess if request.images else 0.0)
        if request.images and self.system.decoupled:
            self.events.call_at(ready_at, partial(self._encode, request, due))
        else:
            self.events.call_at(ready_at, partial(self._prefill, request, due))

    def _encode(self, request: Request, due: float) -> None:
        """Encode the images of a request side by side; its prefill follows the last."""
        profile, missing = self.profile, [request.images]
        latest = due - profile.encode_alone - profile.transfer - profile.prefill(request.text_tokens, request.images)

        def on_encoded() -> None:
            missing[0] -= 1
            if not missing[0]:
                self.events.call_at(self.events.now + profile.transfer, partial(self._prefill, request, due))

        for _ in range(request.images):
            self.images.send(profile.image_tokens, profile.encode_alone, latest, on_encoded)

    def _prefill(self, request: Request, due: float) -> None:
        seconds = self.profile.prefill(request.text_tokens, request.images)
        tokens = self.profile.prompt_tokens(request.text_tokens, request.images)
        if not self.system.decoupled:
            seconds += request.images * self.profile.encode
            tokens = request.text_tokens + request.images * self.profile.image_tokens
        self.texts.send(tokens, seconds, due - seconds, partial(self._answer, request))

    def _answer(self, request: Request) -> None:
        seconds = self.events.now - request.arrival_seconds
        answer = Answer(request, seconds, slo_seconds(self.profile, request))
        self.answers.append(answer)
        self.recent.append(answer)


@dataclass(frozen=True, slots=True)
class LatencyFigures:
    """Seconds to the first token, mean and P99, and the lower share in time of both kinds of requests."""

    mean_seconds: float
    p99_seconds: float
    attainment: float


def sum_up(answers: Sequence[Answer]) -> LatencyFigures:
    """Sum up a run; text and image requests have attainments of their own, as they have SLOs."""
    seconds = np.array([answer.seconds for answer in answers])
    kinds = [[a.in_time for a in answers if bool(a.request.images) is has_images] for has_images in (False, True)]
    attainment = min((float(np.mean(kind)) for kind in kinds if kind), default=1.0)
    return LatencyFigures(float(seconds.mean()), float(np.quantile(seconds, 0.99, method="higher")), attainment)
