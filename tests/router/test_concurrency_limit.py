"""Concurrency limit against a simulated server: overload, calm, and different speeds."""

from collections import deque
from dataclasses import dataclass, field

import pytest

from trimtab_router.admission.concurrency_limit import (
    ASSUMED_RPS,
    MAX_REQUESTS,
    MIN_REQUESTS,
    ConcurrencyLimit,
    LimitBounds,
    LoadSample,
    limit_bounds,
)
from trimtab_router.scheduling.latency_model import StageCapacity

SLO = 0.5
STEP = 0.01
LOOK = 10
"""Steps between two looks of the window."""


@dataclass
class Server:
    """First come, first served, so many requests a second; who waited longer than the SLO was served in vain."""

    window: ConcurrencyLimit
    rate: float
    waiting: deque[float] = field(default_factory=deque)
    now: float = 0.0
    answered: int = 0
    good: int = 0
    refused: int = 0
    _work: float = 0.0
    _offered: float = 0.0
    _steps: int = 0

    def run(
        self, seconds: float, offered: float, *, late_seconds: float = 0.0, bounds: LimitBounds | None = None
    ) -> float:
        before = self.good
        for _ in range(round(seconds / STEP)):
            self.now += STEP
            self._steps += 1
            self._arrive(offered)
            self._serve()
            if self._steps % LOOK == 0:
                seen = LoadSample(self.now, self.answered, self.refused, len(self.waiting), late_seconds)
                self.window.observe(seen, bounds)
        return (self.good - before) / seconds

    def _arrive(self, offered: float) -> None:
        self._offered += offered * STEP
        while self._offered >= 1:
            self._offered -= 1
            if len(self.waiting) < self.window.limit:
                self.waiting.append(self.now)
            else:
                self.refused += 1

    def _serve(self) -> None:
        self._work = self._work + self.rate * STEP if self.waiting else 0.0
        while self.waiting and self._work >= 1:
            self._work -= 1
            self.answered += 1
            self.good += self.now - self.waiting.popleft() <= SLO


def settled(rate: float, offered: float) -> Server:
    server = Server(ConcurrencyLimit(SLO), rate)
    server.run(10.0, offered)
    return server


@pytest.mark.parametrize("rate", [50.0, 400.0, 2000.0])
@pytest.mark.parametrize("times", [3.0, 10.0])
def test_overload_serves_nine_tenths_of_capacity_in_time(rate, times):
    assert settled(rate, times * rate).run(20.0, times * rate) >= 0.9 * rate


@pytest.mark.parametrize(("before", "after"), [(900.0, 300.0), (300.0, 900.0)])
def test_limit_follows_the_speed_of_the_machine(before, after):
    server = settled(before, 2700.0)
    server.rate = after
    server.run(4.0, 2700.0)  # those let in before the change are late, and learning takes a moment

    assert server.run(20.0, 2700.0) >= 0.9 * after


@pytest.mark.parametrize("share", [0.1, 0.8])
def test_nothing_is_refused_below_capacity(share):
    server = Server(ConcurrencyLimit(SLO), 400.0)

    assert server.run(30.0, share * 400.0) >= 0.95 * share * 400.0
    assert server.refused == 0


def test_after_an_overload_it_opens_again():
    server = settled(400.0, 4000.0)
    server.run(10.0, 100.0)

    assert server.window.limit == ASSUMED_RPS * SLO


def test_where_more_was_answered_more_may_come_at_once():
    server = settled(4000.0, 3000.0)

    assert server.window.limit >= 0.95 * 3000.0 * SLO


@pytest.mark.parametrize("rate", [400.0, 1000.0])
def test_a_flood_after_calm_costs_about_a_second(rate):
    server = settled(rate, 50.0)

    assert server.run(10.0, 10 * rate) >= 0.85 * rate


def test_lateness_lowers_the_limit_but_one_stall_does_not():
    bounds = LimitBounds(MIN_REQUESTS, 200)
    server = Server(ConcurrencyLimit(SLO), 400.0)
    server.run(10.0, 1200.0, late_seconds=0.2, bounds=bounds)
    late = server.window.limit
    assert late <= 0.2 * 400.0

    window = ConcurrencyLimit(SLO)
    for number in range(40):
        seen = LoadSample(number * 0.1, number * 20, 0, 50, 1.0 if number == 20 else 0.0)
        window.observe(seen, bounds)
    assert window.limit == 200


def test_limit_stays_within_its_bounds():
    server = Server(ConcurrencyLimit(SLO), 20.0)
    server.run(10.0, 200.0, bounds=LimitBounds.of(80.0, 400.0))
    assert server.window.limit == 80

    assert LimitBounds.of(3.0, None) == LimitBounds(MIN_REQUESTS, MAX_REQUESTS)
    assert LimitBounds.of(3.0, 5.0) == LimitBounds(MIN_REQUESTS, MIN_REQUESTS)
    assert LimitBounds.of(1e9, 1e12) == LimitBounds(MAX_REQUESTS, MAX_REQUESTS)


def test_single_pause_refuses_nothing():
    window = ConcurrencyLimit(SLO)
    answered = 0
    for number in range(60):
        paused = number == 30
        answered += 2 if paused else 60
        now = number * 0.1 + (0.8 if number >= 30 else 0.0)
        window.observe(LoadSample(now, answered, 0, 64, 0.8 if paused else 0.002))

        assert window.limit > 64


def test_full_batches_set_no_floor_if_router_is_bottleneck():
    """Replicas would take 512 at once; what can be answered in time is a third of that, and no more is let in."""
    server = Server(ConcurrencyLimit(SLO), 500.0)
    bounds = LimitBounds.of(512.0, 6400.0, busy_seconds=0.02)
    server.run(10.0, 1500.0, bounds=bounds)

    assert server.run(20.0, 1500.0, bounds=bounds) >= 0.9 * 500.0


def test_bottleneck_replicas_get_full_batches():
    server = Server(ConcurrencyLimit(SLO), 320.0)
    bounds = LimitBounds.of(256.0, 320.0, busy_seconds=0.4)
    server.run(10.0, 1000.0, bounds=bounds)

    assert server.window.limit == 256


@pytest.mark.parametrize(("late_seconds", "fastest_rps", "limit"), [(0.0, 0.0, 16), (0.0, 400.0, 80), (0.2, 400.0, 16)])
def test_rate_at_slow_points_is_no_capacity(late_seconds: float, fastest_rps: float, limit: int) -> None:
    server = Server(ConcurrencyLimit(SLO), 40.0)
    server.run(10.0, 300.0, late_seconds=late_seconds, bounds=LimitBounds.of(16.0, 400.0, 0.05, fastest_rps))

    assert server.window.limit == limit


def test_slower_points_make_the_capacity_that_of_the_fastest() -> None:
    stages = [(StageCapacity(40, 0.1), 1.0), (StageCapacity(40, 0.1), 4.0)]

    assert limit_bounds(stages, SLO, "Predicted", has_slower=True) == LimitBounds(100, 100, 0.2, 100.0)


@pytest.mark.parametrize(
    ("stages", "bounds"),
    [
        # Twice 40 rows are 80 requests; 2 × 0.5 s at 40 / 0.1 s are 400.
        ([(StageCapacity(40, 0.1), 1.0)], LimitBounds(80, 400, 0.1)),
        # Four rows a request: 20 beside 80 requests; the second stage is the slower one, with 100 a second.
        ([(StageCapacity(40, 0.1), 1.0), (StageCapacity(40, 0.1), 4.0)], LimitBounds(100, 100, 0.2)),
        ([(StageCapacity(40, 0.1), 1.0), (StageCapacity(40, 0.0), 1.0)], LimitBounds(160, MAX_REQUESTS, None)),
        ([(StageCapacity(1, 0.1), 1.0)], LimitBounds(MIN_REQUESTS, MIN_REQUESTS, 0.1)),
        ([(StageCapacity(40, 0.1), 1.0), (StageCapacity(0, 0.1), 1.0)], None),
        ([], LimitBounds(MIN_REQUESTS, MAX_REQUESTS, None)),
    ],
)
def test_the_bounds_follow_from_what_stages_carry(stages, bounds):
    assert limit_bounds(stages, SLO, "Predicted") == bounds


@pytest.mark.parametrize("drop_policy", ["Expired", "Never"])
def test_requests_without_drop_policy_may_wait(drop_policy):
    assert limit_bounds([(StageCapacity(0, 0.1), 1.0)], SLO, drop_policy) == LimitBounds(MAX_REQUESTS, MAX_REQUESTS)
