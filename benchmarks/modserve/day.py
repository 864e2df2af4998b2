"""Hours with a burst of images: pools that follow their tokens, against a monolith that does, against peaks kept up."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

from benchmarks.modserve.cluster import Cluster, Pool, System, promise
from benchmarks.modserve.evaluation import figures, mixture, sizes
from benchmarks.modserve.paper import GPUS, IMAGE_GPUS, MONOLITH_GPUS, TEXT_GPUS, Profile
from benchmarks.modserve.token_pools import CapacityPoint, PoolProfile, Scaling, divide, scale
from trimtab_loadtester.multimodal.traffic import Request, Traffic, draw

MINUTE: Final = 60.0
WINDOW_MINUTES: Final = 5
"""Pools are sized for the busiest minute of so many, the paper's period (section 4.2)."""
PLENTY: Final = 400
"""Instances of a pool that nobody waits for, while the other one is measured."""
MEASURED: Final = {"images": 16, "texts": 4, "monolith": 8}
"""Instances of a pool that is measured. It is made no smaller: one of few carries less than one of many."""
UTILISATIONS: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
HEADROOM: Final = 1.2


@dataclass(frozen=True, slots=True)
class Day:
    """GPUs in use minute by minute (mean), what was offered, and what was kept."""

    gpus: tuple[float, ...]
    image_gpus: tuple[float, ...]
    attainment: float
    mean_gpus: float
    peak_gpus: int


def tokens(system: System, profile: Profile, asked: Sequence[Request]) -> tuple[int, int]:
    """Tokens of images, and those that the text instances (or the monolith) read."""
    images = sum(one.images for one in asked) * profile.image_tokens
    if not system.decoupled:
        return 0, images + sum(one.text_tokens for one in asked)
    return images, sum(profile.prompt_tokens(one.text_tokens, one.images) for one in asked)


@cache
def measured(system: System, profile: Profile, which: str) -> PoolProfile:
    """What one instance of a pool carries, the other pool being in nobody's way; time as a share of the promise."""
    count = MEASURED[which]
    instances = {"images": (count, PLENTY), "texts": (PLENTY, count), "monolith": (0, count)}[which]
    gpus = {"images": IMAGE_GPUS, "texts": TEXT_GPUS, "monolith": MONOLITH_GPUS}[which]
    points = []
    for utilisation in UTILISATIONS:
        rate = utilisation * count / _work(system, profile, which)
        asked = mixture(rate, seed=9)
        shares = [
            _share(profile, which, one.request, one.seconds) for one in Cluster(system, profile, instances).run(asked)
        ]
        offered = tokens(system, profile, asked)[0 if which == "images" else 1] * rate / len(asked) / count
        points.append(CapacityPoint(offered, float(np.quantile([one for one in shares if one >= 0], 0.99))))
    return PoolProfile(tuple(points), gpus)


def _work(system: System, profile: Profile, which: str) -> float:
    """Mean seconds of an instance a request costs."""
    asked = draw(Traffic.steady(1.0, 20_000), seed=8)
    encode = sum(one.images for one in asked) * (profile.encode_alone if system.decoupled else profile.encode)
    prefill = sum(profile.prefill(one.text_tokens, one.images) for one in asked)
    return {"images": encode, "texts": prefill, "monolith": encode + prefill}[which] / len(asked)


def _share(profile: Profile, which: str, request: Request, seconds: float) -> float:
    """The share of its promise that a request spent in the pool that is measured; negative where it was not there."""
    if which == "images" and not request.images:
        return -1.0
    others = 0.0
    if which == "images":
        others = profile.prefill(request.text_tokens, request.images)
    elif which == "texts" and request.images:
        others = profile.preprocess + profile.encode_alone + profile.transfer
    return max(0.0, seconds - others) / promise(profile, request)


class Follower:
    """Resizes the pools of a cluster by the tokens of the last minute."""

    def __init__(self, cluster: Cluster, asked: Sequence[Request]) -> None:
        self.gpus: list[float] = []
        self.image_gpus: list[float] = []
        self._cluster, self._asked = cluster, asked
        self._states: dict[int, Scaling] = {}
        self._loads: deque[tuple[int, int]] = deque(maxlen=WINDOW_MINUTES)
        self._minute = 0
        self._at = 0

    def due(self) -> None:
        """A minute has passed."""
        cluster, self._minute = self._cluster, self._minute + 1
        first = self._at
        while self._at < len(self._asked) and self._asked[self._at].arrival_seconds < self._minute * MINUTE:
            self._at += 1
        self._loads.append(tokens(cluster.system, cluster.profile, self._asked[first : self._at]))
        images, texts = (max(loads) for loads in zip(*self._loads, strict=True))
        attained = [answered.kept for _, answered in cluster.lately]
        cluster.lately.clear()
        attainment = sum(attained) / len(attained) if attained else 1.0
        needed = self._needed(HEADROOM * images / MINUTE, HEADROOM * texts / MINUTE)
        for pool, wanted in zip((cluster.images, cluster.texts), needed, strict=True):
            if wanted:
                self._resize(pool, wanted, attainment)
        self.image_gpus.append(IMAGE_GPUS * cluster.images.wanted if cluster.system.decoupled else 0)
        self.gpus.append(self.image_gpus[-1] + TEXT_GPUS * cluster.texts.wanted)
        cluster.agenda.call_at(cluster.agenda.now + MINUTE, self.due)

    def _needed(self, images: float, texts: float) -> tuple[int, int]:
        system, profile = self._cluster.system, self._cluster.profile
        if not system.decoupled:
            return 0, max(MEASURED["monolith"], int(measured(system, profile, "monolith").replicas(texts, 1.0)))
        found = divide(
            measured(system, profile, "images"),
            measured(system, profile, "texts"),
            image_tokens_per_second=images,
            text_tokens_per_second=texts,
            slo_seconds=1.0,
        )
        if found is None:
            raise ValueError("no split keeps the promise: measured pools are slower than it alone")
        return max(MEASURED["images"], found.image_replicas), max(MEASURED["texts"], found.text_replicas)

    def _resize(self, pool: Pool, wanted: int, attainment: float) -> None:
        state = scale(self._states.get(id(pool), Scaling(pool.wanted)), wanted, attainment)
        state = Scaling(min(state.replicas, GPUS // pool.gpus), state.fewer)
        self._states[id(pool)] = state
        if state.replicas != pool.wanted:
            pool.resize(state.replicas)


def day(system: System, profile: Profile, traffic: Traffic, seed: int) -> Day:
    """Serve hours, minute by minute, with pools that follow."""
    asked = draw(traffic, seed)
    cluster = Cluster(system, profile, sizes(system))
    follower = Follower(cluster, asked)
    cluster.agenda.call_at(MINUTE, follower.due)
    answers = cluster.run(asked)
    spent = (cluster.images.gpu_seconds + cluster.texts.gpu_seconds) / cluster.agenda.now
    kept = figures(answers).attainment
    minutes = traffic.rps.size
    used = follower.gpus[:minutes]
    return Day(tuple(used), tuple(follower.image_gpus[:minutes]), kept, spent, int(max(used)))
