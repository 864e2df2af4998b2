"""Simulated cluster of ModServe's evaluation: instances of a monolith, or pools of encoders and of text instances.

The paper (Qiu et al., SoCC 2025) draws its latencies without their numbers. Printed are shares of the time to the first
token of one image (section 3.1): 79 % encoding for Llama 3.2 Vision 11B, 25 % for InternVL 2.5 26B. So the unit of time
is that time, alone on four GPUs; no conclusion depends on the unit.

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

from trimtab_adapter.simulation.event_queue import EventQueue
from trimtab_loadtester.multimodal.traffic import IMAGE_SHARE, Request, Traffic, draw

STEPS: Final = {
    "decoupled": "−27 % and −42 % (Llama), −46 % and −47 % (InternVL) over the monolith",
    "+ scheduling": "−12 % and −25 % over decoupled",
    "+ routing": "−14 % and −32 % over + scheduling",
}
"""Section 5.2: mean and P99 of the time to the first token."""

MONOLITH_GPUS: Final = 4
TEXT_GPUS: Final = 4
IMAGE_GPUS: Final = 1
GPUS: Final = 128
MONOLITHS, TEXTS, IMAGES = 32, 20, 48
"""Replicas of 128 GPUs (section 5.2)."""
MEDIAN_TEXT_TOKENS: Final = 779
"""Of text requests in the paper's trace."""
IMAGE_PROMPT_TOKENS: Final = 100
"""Assumed, of text beside one image in what the paper profiles: ShareGPT-4o's questions are short (figure 4)."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds of one model, in units of its time to the first token for one image alone."""

    name: str
    image_tokens: int
    """Of one image of 896 x 896 pixels (table 1)."""
    preprocess: float
    """Of an image, on CPU cores that are always free."""
    encode: float
    """Of an image on the four GPUs of a monolith."""
    encode_alone: float
    """Of an image on one GPU."""
    prefill_base: float
    """Of any request."""
    prefill_token: float
    """Of each token of the prompt; image tokens count for decoder-only models."""
    prefill_image: float
    """Of the cross-attention to one image."""
    throughput_gain: float
    """Of ModServe over the monolith within the SLO, as printed (section 5.2)."""
    fewer_gpus: float
    """The share of GPUs that ModServe saves in hours with a burst, as printed (section 1)."""
    transfer: float = 0.005
    """Of one request's embeddings, RDMA (section 5.5: 5 ms, under 0.5 % of the time to the first token)."""

    @property
    def decoder_only(self) -> bool:
        """Whether image tokens are part of the prompt."""
        return self.prefill_image == 0

    @property
    def kind(self) -> str:
        return "decoder-only" if self.decoder_only else "cross-attention"

    def prompt_tokens(self, text_tokens: int, images: int) -> int:
        return text_tokens + (images * self.image_tokens if self.decoder_only else 0)

    def prefill(self, text_tokens: int, images: int) -> float:
        tokens = self.prompt_tokens(text_tokens, images)
        return self.prefill_base + tokens * self.prefill_token + images * self.prefill_image

    def alone(self, text_tokens: int, images: int) -> float:
        """Return the seconds to the first token on an idle monolith."""
        return (self.preprocess if images else 0.0) + images * self.encode + self.prefill(text_tokens, images)


LLAMA: Final = Profile(
    name="Llama 3.2 Vision 11B (cross-attention)",
    image_tokens=6404,
    preprocess=0.05,
    encode=0.79,
    encode_alone=0.79 * 1.6,
    prefill_base=0.08,
    prefill_token=0.02 / IMAGE_PROMPT_TOKENS,
    prefill_image=0.06,
    throughput_gain=3.3,
    fewer_gpus=0.413,
)
INTERNVL: Final = Profile(
    name="InternVL 2.5 26B (decoder-only)",
    image_tokens=1280,
    preprocess=0.05,
    encode=0.25,
    encode_alone=0.25 * 2.5,
    prefill_base=0.04,
    prefill_token=0.66 / (1280 + IMAGE_PROMPT_TOKENS),
    prefill_image=0.0,
    throughput_gain=5.5,
    fewer_gpus=0.25,
    transfer=0.003,
)
MODELS: Final = (LLAMA, INTERNVL)
ASSUMED: Final = (
    "an encoder on one GPU takes 1.6 times as long as on four (630 M parameters: the paper finds four fastest, eight "
    "slower) or 2.5 times (6 B: eight are still 1.3 times faster than four), so that one GPU of four does 2.5 and 1.6 "
    "times as much; preprocessing 5 % of the time to the first token; 100 tokens of text beside the image that is "
    "profiled; in the load as much text as the trace's images leave of their contexts, and sixteen images in place of "
    "more, which one image request in eight has; decode takes nothing from prefill (the paper sees the same time "
    "between tokens in all); a monolith works on one request at a time, images first; a request's promise is twenty "
    "times what one of its kind (a median text, one image) takes alone: with ten, a monolith that does nothing else "
    "breaks it for more than one in a hundred, by sixteen images"
)

REQUESTS: Final = 8_000


def draw_mixture(rate: float, seed: int) -> list[Request]:
    """Draw requests at a steady rate, with the trace's images."""
    return draw(Traffic.steady(rate, REQUESTS / rate, IMAGE_SHARE), seed)


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
