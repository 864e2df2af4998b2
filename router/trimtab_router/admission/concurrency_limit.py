"""How many requests may be under way in this router, so that those let in can be answered in time. Pure.

Little's law: who joins n requests that are answered at a rate of r a second waits n / r. While more is offered than is
let in, the measured rate is what the machine can do, whatever its speed; n follows it, as a share of the latency
promise. More are under way than are answered within the promise: that is too much too, before anybody is turned away.
It grows while there is none of this, and stays between what keeps every replica busy and what the plan's
stages could ever carry. How late the event loop is counts as waiting too: requests wait in sockets, uncounted.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab_router.scheduling.latency_model import StageCapacity
from trimtab_router.scheduling.policies.interface import DropPolicy

SLO_SHARE = 0.4
"""Of the promise, how long those let in may take on average; the rest is for what varies."""
LEAST_SHARE = 0.1
FLOOR_REQUESTS = 16
BUSY_TIMES = 2.0
MOST_REQUESTS = 4096
CARRIED_SLACK = 2.0
"""Times what is carried within one SLO: how many requests the window may ever let in."""
MEASURED_SECONDS = 0.2
MEASURED_SHARE = 0.2
"""Of the promise too: the least time over which a rate is measured, longer where so many answers have not come yet."""
LONGEST_MEASURED_SECONDS = 1.0
ENOUGH_ANSWERS = 50
GROWTH = 1.25
ASSUMED_RPS = 1000.0
"""What a router is taken to answer until it has answered more: what it answers within the promise may come at once.

Where a flood follows calm, all that are let in before the first measurement may be late.
"""
FADES = 0.99
"""What remains of the best rate from one measurement to the next."""
LATE_SHARE = 0.1
"""Of the promise, how late the event loop must be, time after time, to be called overloaded."""
LATE_TIMES = 3
AGREEING_TIMES = 2
"""How many measurements in a row must say that less can be done: one pause of the machine turns nobody away."""
HOPELESS_TIMES = 4.0
"""How many times what can be answered in time must stand there for one measurement to be enough."""
PAUSE_SHARE = 0.5
"""Of a measurement, how long the loop may have stood still; more, once, was a pause of the machine and says nothing."""
FULL_SHARE = 0.9
"""Of the limit, from which on it counts as reached: where a door in front keeps to it, nobody is refused here."""


@dataclass(frozen=True, slots=True)
class LoadSample:
    """What the router saw by a moment; counts are since its start.

    Args:
        now: monotonic seconds.
        answered: requests answered.
        refused: requests turned away because the window was full.
        under_way: requests let in and not ended.
        late_seconds: how late the event loop is.
    """

    now: float
    answered: int
    refused: int
    under_way: int
    late_seconds: float


@dataclass(frozen=True, slots=True)
class LimitBounds:
    """Between how many requests the window stays: what keeps the replicas busy, and all that the plan could carry."""

    least: int = FLOOR_REQUESTS
    most: int = MOST_REQUESTS
    busy_seconds: float | None = None
    """What full batches take in all stages together; None where that is not known."""

    @classmethod
    def of(
        cls, busy_requests: float, carried_requests: float | None, busy_seconds: float | None = None
    ) -> "LimitBounds":
        """From the requests that keep every replica busy, and those carried within one SLO (None where unknown)."""
        least = min(max(FLOOR_REQUESTS, round(busy_requests)), MOST_REQUESTS)
        most = MOST_REQUESTS if carried_requests is None else min(round(carried_requests), MOST_REQUESTS)
        return cls(least, max(least, most), busy_seconds)

    def floor(self, rate: float) -> float:
        """The least limit while so many requests are answered a second.

        Replicas that are the narrowest place need full batches, waiting and served. Where the router is narrower,
        batches are not full, and so many requests would only wait: twice what can be in the stages at that rate is
        enough for the rate to grow.
        """
        if self.busy_seconds is None:
            return self.least
        return min(self.least, max(FLOOR_REQUESTS, BUSY_TIMES * rate * self.busy_seconds))


def limit_bounds(
    stages: Sequence[tuple[StageCapacity, float]], slo_seconds: float, drop_policy: DropPolicy
) -> LimitBounds | None:
    """The bounds that the stages which work set; None while one has no replica, which says nothing of the next.

    Args:
        stages: what the ready replicas of each carry, and how many of its rows a request has.
        slo_seconds: the latency promise.
        drop_policy: the pipeline's.
    """
    if drop_policy != "Predicted":
        return LimitBounds(MOST_REQUESTS, MOST_REQUESTS)  # who may be answered late may wait
    if not all(carries.rows for carries, _ in stages):
        return None
    busy = BUSY_TIMES * sum(carries.rows / rows for carries, rows in stages)
    if not stages or not all(carries.seconds for carries, _ in stages):
        return LimitBounds.of(busy, None)
    slowest_rps = min(carries.rows / carries.seconds / rows for carries, rows in stages)
    return LimitBounds.of(
        busy, CARRIED_SLACK * slo_seconds * slowest_rps, sum(carries.seconds for carries, _ in stages)
    )


class ConcurrencyLimit:
    """The limit, as it follows what was observed.

    Args:
        slo_seconds: the latency promise.
    """

    def __init__(self, slo_seconds: float) -> None:
        self._slo_seconds = slo_seconds
        self._bounds = LimitBounds()
        self._floor = float(FLOOR_REQUESTS)
        self._best_rps = ASSUMED_RPS
        self._limit = ASSUMED_RPS * slo_seconds
        self._since: LoadSample | None = None
        self._late: deque[float] = deque(maxlen=LATE_TIMES)
        self._fullest = 0
        self._targets: deque[float] = deque(maxlen=AGREEING_TIMES)

    @property
    def limit(self) -> int:
        """How many requests may be under way now."""
        return int(min(max(self._limit, self._floor), self._bounds.most))

    def observe(self, seen: LoadSample, bounds: LimitBounds | None = None) -> None:
        """Follow what was seen; call it several times a second while requests are under way."""
        if bounds is not None:
            self._bounds = bounds
            self._floor = max(self._floor, bounds.floor(0.0))
        self._late.append(seen.late_seconds)
        self._fullest = max(self._fullest, seen.under_way)
        since = self._since
        if since is None:
            self._since = seen
            return
        seconds = seen.now - since.now
        answered = seen.answered - since.answered
        least_seconds = max(MEASURED_SECONDS, MEASURED_SHARE * self._slo_seconds)
        longest_seconds = max(LONGEST_MEASURED_SECONDS, self._slo_seconds)
        if seconds < least_seconds or (answered < ENOUGH_ANSWERS and seconds < longest_seconds):
            return
        paused = seen.late_seconds > PAUSE_SHARE * seconds and min(self._late) < LATE_SHARE * self._slo_seconds
        if not paused:
            self._follow(since, seen, answered / seconds)
        self._since, self._fullest = seen, 0

    def _follow(self, since: LoadSample, seen: LoadSample, rate: float) -> None:
        slo_seconds, self._floor = self._slo_seconds, self._bounds.floor(rate)
        self._best_rps = max(ASSUMED_RPS, FADES * self._best_rps, rate)
        late = min(self._late) if len(self._late) == LATE_TIMES else 0.0
        slow = late > LATE_SHARE * slo_seconds and self._fullest >= self._floor
        standing = min(since.under_way, seen.under_way)
        crowded = standing > max(rate * slo_seconds, self._floor)
        full = self._fullest >= FULL_SHARE * self.limit
        if slow or crowded or full or seen.refused > since.refused:
            self._targets.append(rate * max(SLO_SHARE * slo_seconds - late, LEAST_SHARE * slo_seconds))
            hopeless = seen.under_way > HOPELESS_TIMES * max(rate * slo_seconds, self._floor)
            if len(self._targets) == AGREEING_TIMES or hopeless:
                self._limit = min(max(*self._targets, self._floor), self.limit * 2.0)
        else:
            self._limit = min(self.limit * GROWTH, self._best_rps * slo_seconds, self._bounds.most)
            if self._targets:
                self._targets.popleft()

    def forget(self) -> None:
        """Nothing was under way: what was counted until now says nothing about the next crowd."""
        self._since, self._fullest = None, 0
        self._late.clear()
