"""How long will a batch take? The profile's answer, corrected by what is observed here and now.

A plan brings the profiled seconds of each batch size. The machine at hand may be slower, faster or noisy, so the ratio
of observed to profiled is followed by a moving average, and its spread with it (as TCP follows its round trip). Without
a profile the observed seconds themselves are averaged per batch size. What a batch waits at its replica for those of
other routers is followed apart: it makes answers late, but says nothing of how fast the machine is.
"""

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

Key = tuple[str, str]
WEIGHT = 0.125
"""Weight of the newest observation, as in TCP's round-trip estimate (RFC 6298)."""
PROFILED = 0.5
"""How many of the first batches a profile counts as where they are quicker: a pause makes none quicker, so they soon
outweigh it."""
RATIO_BOUNDS = (0.05, 50.0)
DOUBT = 0.95
LEAST_WAIT_SECONDS = 0.001
"""Less than this is no other router's batch but the jitter of sending and being told."""
OUTLIER = 4.0
"""An observation this many times the estimate counts only so much: one pause must not drop a whole queue."""
STAGE_WEIGHT = 0.02
"""Weight of the newest batch in what is held of a whole stage: what it steers must not follow single batches."""
ENOUGH = 3
"""Observations before what was seen without a profile is held against rows that an idle replica could take."""
BELIEVED = 4
"""Drops in front of an idle replica for which what was seen before them is still believed: some rows are hopeless."""


@dataclass(slots=True)
class _Estimate:
    sizes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    profiled: bool = False
    observations: int = 0
    ratio: float = 1.0
    spread: float = 0.0
    doubts: int = 0
    """Drops in front of an idle replica since it was last seen."""
    known: dict[int, float] = field(default_factory=dict)

    @property
    def sure(self) -> float:
        """Observed over profiled, on the safe side."""
        return self.ratio + self.spread

    def base(self, rows: int) -> float:
        """Seconds for so many rows before correction; 0 where nothing is known yet."""
        cached = self.known.get(rows)
        if cached is None:
            cached = self.known[rows] = interpolate(self.sizes, self.seconds, rows)
        return cached

    def together(self, rows: int, beside: int) -> int:
        """How many rows count, of a batch that others are computed beside: as far as a profile tells of so many."""
        return max(min(rows + beside, self.sizes[-1]), rows) if beside and self.profiled else rows

    def forget(self) -> None:
        """Know nothing again of how long it takes."""
        self.sizes, self.seconds, self.known = [], [], {}
        self.ratio, self.spread = 1.0, 0.0


class ServiceTimes:
    """The service times of one stage, by (variant, operating point) and rows."""

    def __init__(self) -> None:
        self._estimates: dict[Key, _Estimate] = {}
        self._latest: _Estimate | None = None
        """Of those with a profile, what was seen last."""
        self._doubts = 0
        """Drops in front of an idle replica since then."""
        self._profiled_seconds = self._observed_seconds = 0.0
        self._wait_seconds = 0.0
        self._wait_spread = 0.0

    def set_profile(self, key: Key, seconds_by_rows: Mapping[int, float]) -> None:
        """Take a plan's table.

        What was learnt about its ratio stays; one that never ran starts with what ran last, since a machine that is
        slow for one model is most likely slow for the next.
        """
        if not seconds_by_rows:
            return
        estimate = self._estimates.setdefault(key, _Estimate())
        if not estimate.profiled:
            estimate.ratio, estimate.spread = self._latest.ratio if self._latest else 1.0, 0.0
        estimate.sizes = sorted(seconds_by_rows)
        estimate.seconds = [seconds_by_rows[size] for size in estimate.sizes]
        estimate.profiled = True
        estimate.known = {}

    def profiled(self, key: Key, most_rows: int) -> tuple[float, ...]:
        """Seconds of batches of 1, 2, … rows as a plan tells them; none where it does not."""
        estimate = self._estimates.get(key)
        if estimate is None or not estimate.profiled:
            return ()
        return tuple(estimate.base(rows) for rows in range(1, most_rows + 1))

    def predict(self, key: Key, rows: int, *, concurrent: int = 0) -> float:
        """Seconds a batch of so many rows will take, on the safe side; 0 where nothing is known yet.

        Args:
            key: what it runs.
            rows: of it.
            beside: how many others are computed beside it, where a replica takes up one after the other.
        """
        estimate = self._estimates.get(key)
        if estimate is None:
            return 0.0
        return (
            estimate.base(estimate.together(rows, concurrent)) * (estimate.ratio + estimate.spread)
            + self._wait_seconds
            + self._wait_spread
        )

    def expect(self, key: Key, rows: int) -> float:
        """Seconds a batch of so many rows takes on average; 0 where nothing is known yet."""
        estimate = self._estimates.get(key)
        return estimate.base(rows) * estimate.ratio if estimate else 0.0

    def ratio(self, key: Key) -> float:
        """Observed over profiled, 1 before the first observation."""
        estimate = self._estimates.get(key)
        return estimate.ratio if estimate else 1.0

    @property
    def stage_ratio(self) -> float:
        """Observed over profiled seconds of all batches lately, whatever they ran at; 1 before the first."""
        return self._observed_seconds / self._profiled_seconds if self._profiled_seconds else 1.0

    def relax(self, keys: Collection[Key]) -> None:
        """Believe a little less in the slowness that made us drop rows in front of an idle replica.

        Without this a wrong estimate would drop everything for ever, since what is dropped is never observed. But some
        rows are hopeless however right it is: what was seen lately is believed, and what was not is thought to be as
        fast as what was. One without a profile that rests on a batch or two, which a pause may have held up, is not
        believed at all.

        Args:
            keys: what the rows might have run at.
        """
        self._doubts += 1
        seen_lately = self._latest is not None and self._doubts <= BELIEVED
        if not seen_lately:
            self._wait_seconds *= DOUBT
            self._wait_spread *= DOUBT
        least = self._latest.sure if self._latest is not None and seen_lately else RATIO_BOUNDS[0]
        for estimate in filter(None, map(self._estimates.get, keys)):
            estimate.doubts += 1
            if not estimate.profiled and estimate.observations < ENOUGH:
                estimate.forget()
            elif not estimate.observations or estimate.doubts > BELIEVED:
                share = min(max(DOUBT, least / estimate.sure), 1.0)
                estimate.ratio, estimate.spread = share * estimate.ratio, share * estimate.spread

    def observe_wait(self, seconds: float) -> None:
        """Learn how long a batch waited for those of other routers."""
        self._wait_spread += WEIGHT * (abs(seconds - self._wait_seconds) - self._wait_spread)
        self._wait_seconds += WEIGHT * (seconds - self._wait_seconds)

    def observe(self, key: Key, rows: int, seconds: float, *, concurrent: int = 0) -> None:
        """Learn from a batch that was served, beside so many others."""
        estimate = self._estimates.get(key)
        if estimate is None:
            estimate = self._estimates[key] = _Estimate()
        estimate.observations += 1
        estimate.doubts = 0
        if not estimate.profiled:
            _learn_size(estimate, rows, seconds)
        base = estimate.base(estimate.together(rows, concurrent))
        if base <= 0:
            return
        low, high = RATIO_BOUNDS
        before = estimate.ratio
        bounded = min(max(seconds / base, low), high, OUTLIER * before)
        off = bounded - before
        weight, unsure = WEIGHT, abs(off)
        if off < 0 and estimate.observations + PROFILED < 1 / WEIGHT and estimate.profiled:
            weight, unsure = 1 / (estimate.observations + PROFILED), 0.0
        estimate.spread += WEIGHT * (unsure - estimate.spread)
        estimate.ratio = before + weight * off
        if estimate.profiled:
            self._latest, self._doubts = estimate, 0
            self._profiled_seconds += STAGE_WEIGHT * (base - self._profiled_seconds)
            self._observed_seconds += STAGE_WEIGHT * (bounded * base - self._observed_seconds)
            if len(self._estimates) > 1:
                self._carry_over(estimate.ratio)

    def _carry_over(self, ratio: float) -> None:
        """What never ran is as slow as what did."""
        for estimate in self._estimates.values():
            if not estimate.observations:
                estimate.ratio = ratio


def wait_for_others(waited_seconds: float, departed_at: float, completed_at: float, transfer_seconds: float) -> float:
    """Seconds a batch waited at its replica for batches of other routers, not for our own before it.

    Args:
        waited_seconds: what the replica says that it waited.
        departed_at: when it left.
        completed_at: when our batch before it was answered; before `departed_at` where there was none.
        transfer_seconds: what a batch takes there and back.
    """
    ours = max(completed_at - departed_at - transfer_seconds, 0.0)
    others = waited_seconds - ours
    return others if others > LEAST_WAIT_SECONDS else 0.0


def interpolate(sizes: list[int], seconds: list[float], rows: int) -> float:
    """Seconds for `rows` from a table sorted by size.

    Between two sizes a straight line, below the least its value, above the greatest in proportion to the rows.
    """
    if not sizes:
        return 0.0
    place = bisect_left(sizes, rows)
    if place == len(sizes):
        return seconds[-1] * rows / sizes[-1]
    if sizes[place] == rows or place == 0:
        return seconds[place]
    share = (rows - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
    return seconds[place - 1] + share * (seconds[place] - seconds[place - 1])


def _learn_size(estimate: _Estimate, rows: int, seconds: float) -> None:
    place, expected = bisect_left(estimate.sizes, rows), estimate.base(rows)
    bounded = min(seconds, OUTLIER * expected) if expected > 0 else seconds
    if place < len(estimate.sizes) and estimate.sizes[place] == rows:
        estimate.seconds[place] += WEIGHT * (bounded - estimate.seconds[place])
    else:
        estimate.sizes.insert(place, rows)
        estimate.seconds.insert(place, bounded)
    estimate.known = {rows: estimate.seconds[place]}
