"""`ServiceTimes`: predicted service time of a batch: the profile, corrected by observations.

A plan holds the profiled seconds of each batch size. The machine may be slower, faster or noisy, so a moving average
tracks the ratio of observed to profiled seconds, and its spread, as TCP tracks its round trip. Without a profile, the
observed seconds are averaged by batch size. Predictions follow the last few batches. Plans stand on the ratio over the
last seconds: that of a few batches is mostly noise. The time that a batch waits at its replica for batches of other
routers is tracked separately: it delays responses but says nothing about the machine's speed.
"""

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from trimtab_router.scheduling.winsorizer import Winsorizer

Key = tuple[str, str]
WEIGHT = 0.125  # weight of the newest observation, as in TCP's round-trip estimate (RFC 6298)
PROFILE_WEIGHT = 0.5  # observations that the profile counts as, if first batches are faster: no pause is
RATIO_BOUNDS = (0.05, 50.0)
RELAX_FACTOR = 0.95
MIN_WAIT_SECONDS = 0.001  # shorter waits are jitter, not a batch of another router
OUTLIER = 4.0  # observations beyond this multiple of the estimate are clipped: one pause must not drop a whole queue
STALE_SECONDS = 1.0  # without observations, after which a slow estimate of a faster point is doubted
RECENT_SECONDS = 10.0  # in which a batch loses most of its weight in the recent ratio: two decisions of the adapter
MIN_OBSERVATIONS = 3  # needed without a profile before rows are dropped in front of an idle replica
MAX_WEIGHT = 64  # of a row among concurrent ones, in rows of the lightest point
MAX_IDLE_DROPS = 4  # drops at an idle replica until observations are doubted: some rows are late anyway


@dataclass(slots=True)
class RunningMean:
    """Moving average of seconds, and of their distance from it."""

    mean: float = 0.0
    spread: float = 0.0

    def observe(self, seconds: float) -> None:
        self.spread += WEIGHT * (abs(seconds - self.mean) - self.spread)
        self.mean += WEIGHT * (seconds - self.mean)


@dataclass(slots=True)
class _RecentRatio:
    """Observed over profiled seconds of a variant's batches, which count less with age."""

    observed_seconds: float = 0.0
    profiled_seconds: float = 0.0
    newest_at: float = 0.0


@dataclass(slots=True)
class _Estimate:
    sizes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    profiled: bool = False
    observations: int = 0
    ratio: float = 1.0
    spread: float = 0.0
    winsorizer: Winsorizer = field(default_factory=Winsorizer)
    recent: _RecentRatio = field(default_factory=_RecentRatio)
    """Shared by the points of a variant."""
    observed_at: float = 0.0
    idle_drops: int = 0
    """Drops in front of an idle replica since the last observation."""
    weight: int = 1
    """Seconds that a row adds, in those of the stage's lightest point."""
    max_rows: float = 0.0
    """Rows that count: of the largest profiled size, if all others run at the heaviest point."""
    cached: dict[float, float] = field(default_factory=dict)

    @property
    def safe_ratio(self) -> float:
        return self.ratio + self.spread

    def base(self, rows: float) -> float:
        cached = self.cached.get(rows)
        if cached is None:
            cached = self.cached[rows] = interpolate(self.sizes, self.seconds, rows)
        return cached

    @property
    def row_seconds(self) -> float:
        """Profiled seconds that a row adds to a batch; at most 0 if they do not rise with its rows."""
        if len(self.sizes) == 1:
            return self.seconds[0] / self.sizes[0]
        return (self.seconds[-1] - self.seconds[0]) / (self.sizes[-1] - self.sizes[0])

    def base_beside(self, rows: int, concurrent: int) -> float:
        """Return the seconds of rows beside `concurrent` ones in units of `weight`, up to the largest profiled size."""
        counted = max(min(rows + concurrent / self.weight, self.max_rows), rows) if concurrent else rows
        return self.cached.get(counted) or self.base(counted)

    def forget(self) -> None:
        self.sizes, self.seconds, self.cached = [], [], {}
        self.ratio, self.spread = 1.0, 0.0


class ServiceTimes:
    """Service times of one stage, by variant, operating point and rows."""

    def __init__(self) -> None:
        self._estimates: dict[Key, _Estimate] = {}
        self._latest: _Estimate | None = None  # the profiled estimate that was observed last
        self._idle_drops = 0  # drops in front of an idle replica since then
        self._recent: dict[str, _RecentRatio] = {}  # by variant, over its profiled points
        self.wait = RunningMean()  # at replicas, behind batches of other routers

    def set_profile(self, key: Key, seconds_by_rows: Mapping[int, float]) -> None:
        """Set a point's profile. Its learned ratio stays, or is that of the last point: of the same, slow machine."""
        if not seconds_by_rows:
            return
        estimate = self._estimates.get(key) or self._add(key)
        if not estimate.profiled:
            estimate.ratio, estimate.spread = self._latest.ratio if self._latest else 1.0, 0.0
        estimate.sizes = sorted(seconds_by_rows)
        estimate.seconds = [seconds_by_rows[size] for size in estimate.sizes]
        estimate.profiled = True
        estimate.max_rows = estimate.sizes[-1]
        estimate.cached = {}

    def set_weights(self) -> None:
        """Weigh the rows of each point, for stages whose replicas serve rows of several points concurrently."""
        profiled = [estimate for estimate in self._estimates.values() if estimate.profiled]
        row_seconds = [estimate.row_seconds for estimate in profiled if estimate.row_seconds > 0]
        if len(row_seconds) < 2:
            return
        unit = max(min(row_seconds), max(row_seconds) / MAX_WEIGHT)
        for estimate in profiled:
            estimate.weight = max(round(estimate.row_seconds / unit), 1)
        heaviest = max(estimate.weight for estimate in profiled)
        for estimate in profiled:
            estimate.max_rows = estimate.sizes[-1] * heaviest / estimate.weight

    def profiled(self, key: Key, max_rows: int) -> tuple[float, ...]:
        """Return the planned seconds of batches of 1, 2, … rows; empty if there are none."""
        estimate = self._estimates.get(key)
        if estimate is None or not estimate.profiled:
            return ()
        return tuple(estimate.base(rows) for rows in range(1, max_rows + 1))

    def predict(self, key: Key, rows: int, *, concurrent: int = 0) -> float:
        """Return a batch's seconds plus their spread; 0 if unknown.

        `concurrent`: rows that its replica computes before it, each counted as the `row_weight` of its point.
        """
        estimate = self._estimates.get(key)
        if estimate is None:
            return 0.0
        cached = None if concurrent else estimate.cached.get(rows)
        base = cached or estimate.base_beside(rows, concurrent)
        return base * (estimate.ratio + estimate.spread) + self.wait.mean + self.wait.spread

    def row_weight(self, key: Key) -> int:
        """Return the seconds that a row adds at a point, in those of the lightest point."""
        estimate = self._estimates.get(key)
        return estimate.weight if estimate else 1

    def profiled_beside(self, key: Key, rows: int, concurrent: int) -> float:
        """Return the profiled seconds of rows beside `concurrent` ones, as in `predict`; 0 if there are none."""
        estimate = self._estimates.get(key)
        return estimate.base_beside(rows, concurrent) if estimate and estimate.profiled else 0.0

    def expect(self, key: Key, rows: int) -> float:
        estimate = self._estimates.get(key)
        return (estimate.cached.get(rows) or estimate.base(rows)) * estimate.ratio if estimate else 0.0

    def ratio(self, key: Key) -> float:
        """Return observed over profiled seconds; 1 before the first observation."""
        estimate = self._estimates.get(key)
        return estimate.ratio if estimate else 1.0

    def recent_ratio(self, variant: str) -> float | None:
        """Return observed over profiled seconds of a variant's recent batches at all points; None before the first."""
        recent = self._recent.get(variant)
        return recent.observed_seconds / recent.profiled_seconds if recent and recent.profiled_seconds else None

    def relax(self, keys: Collection[Key]) -> None:
        """Lower the estimates that made the stage drop rows in front of an idle replica.

        Dropped rows are never observed, so a wrong estimate would otherwise drop every row forever. Some rows are late
        even with a correct estimate: recent observations are trusted, and other estimates approach them. An estimate
        without a profile that rests on one or two batches, which a pause may have delayed, is discarded.
        """
        self._idle_drops += 1
        seen_lately = self._latest is not None and self._idle_drops <= MAX_IDLE_DROPS
        if not seen_lately:
            self.wait.mean *= RELAX_FACTOR
            self.wait.spread *= RELAX_FACTOR
        least = self._latest.safe_ratio if self._latest is not None and seen_lately else RATIO_BOUNDS[0]
        for estimate in filter(None, map(self._estimates.get, keys)):
            estimate.idle_drops += 1
            if not estimate.profiled and estimate.observations < MIN_OBSERVATIONS:
                estimate.forget()
            elif not estimate.observations or estimate.idle_drops > MAX_IDLE_DROPS:
                share = min(max(RELAX_FACTOR, least / estimate.safe_ratio), 1.0)
                estimate.ratio, estimate.spread = share * estimate.ratio, share * estimate.spread

    def observe(self, key: Key, rows: int, seconds: float, *, concurrent: int = 0, now: float = 0.0) -> None:
        estimate = self._estimates.get(key)
        if estimate is None:
            estimate = self._add(key)
        estimate.observations += 1
        estimate.idle_drops = 0
        if not estimate.profiled:
            _learn_size(estimate, rows, seconds)
        cached = None if concurrent else estimate.cached.get(rows)
        base = cached or estimate.base_beside(rows, concurrent)
        if base <= 0:
            return
        low, high = RATIO_BOUNDS
        before = estimate.ratio
        bounded = estimate.winsorizer.clip(min(max(seconds / base, low), high, OUTLIER * before))
        off = bounded - before
        weight, unsure = WEIGHT, abs(off)
        if off < 0 and estimate.observations + PROFILE_WEIGHT < 1 / WEIGHT and estimate.profiled:
            weight, unsure = 1 / (estimate.observations + PROFILE_WEIGHT), 0.0
        estimate.spread += WEIGHT * (unsure - estimate.spread)
        estimate.ratio = before + weight * off
        if estimate.profiled:
            self._latest, self._idle_drops = estimate, 0
            recent = estimate.recent
            elapsed_seconds = now - recent.newest_at
            share = 1.0 - elapsed_seconds / RECENT_SECONDS if elapsed_seconds < RECENT_SECONDS else 0.0
            recent.observed_seconds = share * recent.observed_seconds + bounded * base
            recent.profiled_seconds = share * recent.profiled_seconds + base
            recent.newest_at = now
            if len(self._estimates) > 1:
                self._follow(estimate, rows, now)

    def _add(self, key: Key) -> _Estimate:
        estimate = self._estimates[key] = _Estimate()
        estimate.recent = self._recent.setdefault(key[0], estimate.recent)
        return estimate

    def _follow(self, latest: _Estimate, rows: int, now: float) -> None:
        """Let estimates without recent observations follow the one that was observed, on the same machine.

        Without observations they have its ratio. A faster point that was slow when it was observed last would never be
        chosen again, and so never be observed: it has its ratio too, if that is lower.
        """
        latest.observed_at = now
        for estimate in self._estimates.values():
            if not estimate.observations:
                estimate.ratio = latest.ratio
                continue
            stale = estimate.profiled and now - estimate.observed_at > STALE_SECONDS
            if stale and estimate.safe_ratio > latest.safe_ratio and estimate.base(rows) <= latest.base(rows):
                estimate.ratio, estimate.spread = latest.ratio, latest.spread


def wait_for_others(waited_seconds: float, dispatched_at: float, completed_at: float, transfer_seconds: float) -> float:
    """Return the seconds that a batch waited for other routers' batches; `completed_at`: of this router's last."""
    ours = max(completed_at - dispatched_at - transfer_seconds, 0.0)
    others = waited_seconds - ours
    return others if others > MIN_WAIT_SECONDS else 0.0


def interpolate(sizes: list[int], seconds: list[float], rows: float) -> float:
    """Seconds of `rows`: linear between sizes, constant below the smallest, proportional above the largest."""
    if not sizes:
        return 0.0
    index = bisect_left(sizes, rows)
    if index == len(sizes):
        return seconds[-1] * rows / sizes[-1]
    if sizes[index] == rows or index == 0:
        return seconds[index]
    share = (rows - sizes[index - 1]) / (sizes[index] - sizes[index - 1])
    return seconds[index - 1] + share * (seconds[index] - seconds[index - 1])


def _learn_size(estimate: _Estimate, rows: int, seconds: float) -> None:
    index, expected = bisect_left(estimate.sizes, rows), estimate.cached.get(rows) or estimate.base(rows)
    bounded = min(seconds, OUTLIER * expected) if expected > 0 else seconds
    if index < len(estimate.sizes) and estimate.sizes[index] == rows:
        estimate.seconds[index] += WEIGHT * (bounded - estimate.seconds[index])
    else:
        estimate.sizes.insert(index, rows)
        estimate.seconds.insert(index, bounded)
    estimate.cached = {rows: estimate.seconds[index]}
