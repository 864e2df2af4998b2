"""Pools of a large multimodal model, one for images and one for text, each scaled by its own tokens.

A pool needs the offered tokens per second over the capacity of one replica (ModServe, section 4.2). That capacity
depends on the share of the time to the first token that the pool may take. Both pools share one budget, so the cheapest
split of it is searched; the paper sizes its pools separately and does not state how it divides the budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf

from trimtab_adapter.planning.slowdown_estimate import MIN_ATTAINMENT, QUIET_INTERVALS


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

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a pool's profile needs at least one measured point")
        if any(after.tokens_per_second <= before.tokens_per_second for before, after in pairwise(self.points)):
            raise ValueError("points of a pool's profile must stand in rising order of tokens a second")

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

    Args:
        image: of a replica that encodes.
        text: of a replica that prefills and decodes.
        image_tokens_per_second: offered to the image pool.
        text_tokens_per_second: offered to the text pool; for decoder-only models image tokens count there too.
        slo_seconds: promised P99 of the time to the first token.
        transfer_seconds: P99 of bringing the embeddings over.
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
