"""Hours with a burst of images: pools that follow their tokens, and a monolith that follows its own."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

from benchmarks.papers.modserve_cluster import Cluster, Pool, System, slo_seconds, sum_up
from benchmarks.papers.modserve_model import GPUS, IMAGE_GPUS, MONOLITH_GPUS, TEXT_GPUS, Profile, draw_mixture
from benchmarks.papers.token_pools import CapacityPoint, PoolProfile, Scaling, divide, scale
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
class Day:
    """GPUs in use by minute and on average, and the share of requests in time."""

    gpus: tuple[float, ...]
    image_gpus: tuple[float, ...]
    attainment: float
    mean_gpus: float
    max_gpus: int


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
    return Day(gpus, image_gpus, attainment, mean_gpus, int(max(gpus)))
