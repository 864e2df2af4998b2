"""Hours with a burst of images: pools that follow their tokens, and a monolith that follows its own.

A pool needs the offered tokens per second over the capacity of one replica (ModServe, section 4.2). That capacity
depends on the share of the time to the first token that the pool may take. Both pools share one budget, so the cheapest
split of it is searched; the paper sizes its pools separately and does not state how it divides the budget.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import ceil, inf
from typing import Final

import numpy as np

from benchmarks.papers.modserve_cluster import (
    GPUS,
    IMAGE_GPUS,
    MONOLITH_GPUS,
    TEXT_GPUS,
    Cluster,
    Pool,
    Profile,
    System,
    draw_mixture,
    slo_seconds,
    sum_up,
)
from trimtab_adapter.planning.slowdown_estimate import MIN_ATTAINMENT, QUIET_INTERVALS
from trimtab_loadtester.multimodal.traffic import Request, Traffic, draw

MINUTE: Final = 60.0
WINDOW_MINUTES: Final = 5
"""Pools are sized for the busiest minute of so many, the paper's period (section 4.2)."""
UNLIMITED: Final = 400
"""Instances of a pool that never queues, while the other one is measured."""
MEASURED: Final = {"images": 16, "texts": 4, "monolith": 8}
"""Instances of a pool that is measured. It is made no smaller: one of few carries less than one of many."""
UTILISATIONS: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
HEADROOM: Final = 1.2


@dataclass(frozen=True, slots=True)
class CapacityPoint:
    """What was measured of one replica under Poisson arrivals: tokens offered a second, and P99 of its seconds."""

    tokens_per_second: float
    p99_seconds: float


@dataclass(frozen=True, slots=True)
class PoolProfile:
    """One kind of replica: what it was measured to carry, points in rising order of tokens, and its price."""

    points: tuple[CapacityPoint, ...]
    gpus: int

    def capacity(self, within_seconds: float) -> float:
        """Most tokens a second offered to one replica with P99 within so many seconds; 0 where no point keeps to it.

        Between two points it is interpolated; beyond the first that fails nothing counts, lucky ones neither.
        """
        kept: CapacityPoint | None = None
        for point in self.points:
            if point.p99_seconds > within_seconds:
                return 0.0 if kept is None else _between(kept, point, within_seconds)
            kept = point
        return 0.0 if kept is None else kept.tokens_per_second

    def replicas(self, tokens_per_second: float, within_seconds: float) -> float:
        """Replicas for a load: ⌈ML / MC⌉, at least one; infinite where none keeps to the time."""
        capacity = self.capacity(within_seconds)
        return max(1, ceil(tokens_per_second / capacity - 1e-9)) if capacity > 0 else inf


def _between(kept: CapacityPoint, failed: CapacityPoint, within_seconds: float) -> float:
    part = (within_seconds - kept.p99_seconds) / (failed.p99_seconds - kept.p99_seconds)
    return kept.tokens_per_second + part * (failed.tokens_per_second - kept.tokens_per_second)


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Replicas of both pools, what they cost, and how the time to the first token is divided."""

    image_replicas: int
    text_replicas: int
    gpus: int
    image_seconds: float
    text_seconds: float


def divide(
    image: PoolProfile,
    text: PoolProfile,
    *,
    image_tokens_per_second: float,
    text_tokens_per_second: float,
    slo_seconds: float,
    transfer_seconds: float = 0.0,
) -> PoolSizes | None:
    """Return the cheapest sizes of both pools with their split of the time to the first token; None if no split fits.

    It is exact over all splits: the cost changes only at the least time with which a number of image replicas suffices;
    the text pool gets the rest. P99s are added, which is safe: independent queues have no greater P99 of the sum.

    `image`: of a replica that encodes. `text`: of a replica that prefills and decodes. `image_tokens_per_second`:
    offered to the image pool. `text_tokens_per_second`: offered to the text pool; for decoder-only models image tokens
    count there too. `slo_seconds`: promised P99 of the time to the first token. `transfer_seconds`: P99 of bringing the
    embeddings over.
    """
    budget = slo_seconds - transfer_seconds
    best: PoolSizes | None = None
    for seconds in _turning_points(image, image_tokens_per_second, budget):
        replicas = image.replicas(image_tokens_per_second, seconds)
        others = text.replicas(text_tokens_per_second, budget - seconds)
        if inf in (replicas, others):
            continue
        gpus = int(replicas) * image.gpus + int(others) * text.gpus
        if best is None or gpus < best.gpus:
            best = PoolSizes(int(replicas), int(others), gpus, seconds, budget - seconds)
    return best


def _turning_points(profile: PoolProfile, load: float, budget: float) -> list[float]:
    """The least seconds with which each number of replicas suffices, within the budget."""
    seconds = {point.p99_seconds for point in profile.points}
    for before, after in pairwise(profile.points):
        fewest = max(1, ceil(load / after.tokens_per_second - 1e-9))
        most = ceil(load / before.tokens_per_second - 1e-9) if before.tokens_per_second > 0 else fewest
        for replicas in range(fewest, most + 1):
            tokens = load / replicas
            if before.tokens_per_second <= tokens <= after.tokens_per_second and after.p99_seconds > before.p99_seconds:
                part = (tokens - before.tokens_per_second) / (after.tokens_per_second - before.tokens_per_second)
                seconds.add(before.p99_seconds + part * (after.p99_seconds - before.p99_seconds) + 1e-12)
    return sorted(each for each in seconds if each < budget)


@dataclass(frozen=True, slots=True)
class Scaling:
    """State of a pool between periods: its replicas, and those that it would have needed in the last quiet periods."""

    replicas: int
    fewer: Sequence[int] = ()


def scale(state: Scaling, needed: int, attainment: float) -> Scaling:
    """The next state: up at once, down after quiet periods to the most that any of them needed.

    If the SLO is missed though the profile says that the replicas suffice, the profile is wrong by an unknown share,
    so one replica in eight is added.
    """
    if needed > state.replicas:
        return Scaling(needed)
    if attainment < MIN_ATTAINMENT:
        return Scaling(max(needed, state.replicas + ceil(state.replicas / 8)))
    if needed == state.replicas:
        return Scaling(needed)
    fewer = (*state.fewer, needed)
    return Scaling(max(fewer)) if len(fewer) >= QUIET_INTERVALS else Scaling(state.replicas, fewer)


@dataclass(frozen=True, slots=True)
class Day:
    """GPUs in use by minute and on average, and the share of requests in time."""

    gpus: tuple[float, ...]
    image_gpus: tuple[float, ...]
    attainment: float
    mean_gpus: float


def count_tokens(system: System, profile: Profile, requests: Sequence[Request]) -> tuple[int, int]:
    """Return the tokens of images, and those that the text instances (or the monolith) read."""
    images = sum(request.images for request in requests) * profile.image_tokens
    if not system.decoupled:
        return 0, images + sum(request.text_tokens for request in requests)
    return images, sum(profile.prompt_tokens(request.text_tokens, request.images) for request in requests)


@cache
def measure_pool(system: System, profile: Profile, pool: str) -> PoolProfile:
    """Measure what one instance of a pool carries, the other pool being unlimited; time as a share of the SLO."""
    count = MEASURED[pool]
    instances = {"images": (count, UNLIMITED), "texts": (UNLIMITED, count), "monolith": (0, count)}[pool]
    gpus = {"images": IMAGE_GPUS, "texts": TEXT_GPUS, "monolith": MONOLITH_GPUS}[pool]
    points = []
    for utilisation in UTILISATIONS:
        rate = utilisation * count / _work_seconds(system, profile, pool)
        requests = draw_mixture(rate, seed=9)
        answers = Cluster(system, profile, instances).run(requests)
        shares = [
            _slo_share(profile, pool, answer.request, answer.seconds)
            for answer in answers
            if answer.request.images or pool != "images"
        ]
        tokens = count_tokens(system, profile, requests)[0 if pool == "images" else 1]
        points.append(CapacityPoint(tokens * rate / len(requests) / count, float(np.quantile(shares, 0.99))))
    return PoolProfile(tuple(points), gpus)


def _work_seconds(system: System, profile: Profile, pool: str) -> float:
    """Return the mean seconds of an instance that a request takes."""
    requests = draw(Traffic.steady(1.0, 20_000), seed=8)
    encode = sum(r.images for r in requests) * (profile.encode_alone if system.decoupled else profile.encode)
    prefill = sum(profile.prefill(request.text_tokens, request.images) for request in requests)
    return {"images": encode, "texts": prefill, "monolith": encode + prefill}[pool] / len(requests)


def _slo_share(profile: Profile, pool: str, request: Request, seconds: float) -> float:
    """Return the share of its SLO that a request spent in the measured pool."""
    elsewhere = 0.0
    if pool == "images":
        elsewhere = profile.prefill(request.text_tokens, request.images)
    elif pool == "texts" and request.images:
        elsewhere = profile.preprocess + profile.encode_alone + profile.transfer
    return max(0.0, seconds - elsewhere) / slo_seconds(profile, request)


class Follower:
    """Resizes the pools of a cluster by the tokens of the last minutes."""

    def __init__(self, cluster: Cluster, requests: Sequence[Request]) -> None:
        self.gpus: list[float] = []
        self.image_gpus: list[float] = []
        self._cluster, self._requests = cluster, requests
        self._states: dict[int, Scaling] = {}
        self._loads: deque[tuple[int, int]] = deque(maxlen=WINDOW_MINUTES)
        self._minute = 0
        self._next_request = 0

    def on_minute(self) -> None:
        """Resize the pools, and call again in a minute."""
        cluster = self._cluster
        self._minute += 1
        self._loads.append(count_tokens(cluster.system, cluster.profile, self._arrived()))
        images, texts = (max(loads) for loads in zip(*self._loads, strict=True))
        in_time = [answer.in_time for answer in cluster.recent]
        cluster.recent.clear()
        attainment = sum(in_time) / len(in_time) if in_time else 1.0
        needed = self._needed(HEADROOM * images / MINUTE, HEADROOM * texts / MINUTE)
        for pool, size in zip((cluster.images, cluster.texts), needed, strict=True):
            if size:
                self._resize(pool, size, attainment)
        self.image_gpus.append(IMAGE_GPUS * cluster.images.size if cluster.system.decoupled else 0)
        self.gpus.append(self.image_gpus[-1] + TEXT_GPUS * cluster.texts.size)
        cluster.events.call_at(cluster.events.now + MINUTE, self.on_minute)

    def _arrived(self) -> Sequence[Request]:
        first, end = self._next_request, self._minute * MINUTE
        while self._next_request < len(self._requests) and self._requests[self._next_request].arrival_seconds < end:
            self._next_request += 1
        return self._requests[first : self._next_request]

    def _needed(self, image_tokens: float, text_tokens: float) -> tuple[int, int]:
        system, profile = self._cluster.system, self._cluster.profile
        if not system.decoupled:
            replicas = measure_pool(system, profile, "monolith").replicas(text_tokens, 1.0)
            return 0, max(MEASURED["monolith"], int(replicas))
        sizes = divide(
            measure_pool(system, profile, "images"),
            measure_pool(system, profile, "texts"),
            image_tokens_per_second=image_tokens,
            text_tokens_per_second=text_tokens,
            slo_seconds=1.0,
        )
        if sizes is None:
            raise ValueError("no split meets the SLO: measured pools are slower than it alone")
        return max(MEASURED["images"], sizes.image_replicas), max(MEASURED["texts"], sizes.text_replicas)

    def _resize(self, pool: Pool, needed: int, attainment: float) -> None:
        state = scale(self._states.get(id(pool), Scaling(pool.size)), needed, attainment)
        state = Scaling(min(state.replicas, GPUS // pool.gpus), state.fewer)
        self._states[id(pool)] = state
        if state.replicas != pool.size:
            pool.resize(state.replicas)


def simulate_day(system: System, profile: Profile, traffic: Traffic, seed: int) -> Day:
    """Serve hours, minute by minute, with pools that follow the load."""
    requests = draw(traffic, seed)
    cluster = Cluster(system, profile, system.sizes())
    follower = Follower(cluster, requests)
    cluster.events.call_at(MINUTE, follower.on_minute)
    attainment = sum_up(cluster.run(requests)).attainment
    mean_gpus = (cluster.images.gpu_seconds + cluster.texts.gpu_seconds) / cluster.events.now
    gpus, image_gpus = (tuple(used[: traffic.rps.size]) for used in (follower.gpus, follower.image_gpus))
    return Day(gpus, image_gpus, attainment, mean_gpus)
