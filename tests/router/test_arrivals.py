"""Arrivals by second, mean rows per request, and outcomes of the last minute."""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.router_state import RecentRequests
from trimtab_router.observability.arrivals import KEPT_SECONDS, ArrivalCounter, PerRequestMean, RecentOutcomes
from trimtab_router.observability.cpu_usage import CpuUsage


def test_arrivals_by_second():
    counter = ArrivalCounter(1000.0)
    for moment in (1000.1, 1000.9, 1001.5, 1003.2):
        counter.record(moment)

    assert [counter.current(now) for now in (1003.9, 1004.0)] == [1, 0]
    assert counter.history(1004.0) == [2, 1, 0, 1]
    assert counter.peak(1004.0) == 2
    assert counter.peak(1011.5) == 1
    assert counter.history(5000.0) == [0] * 600
    assert counter.history(5000.0, 3998) == [0, 1, *[0] * 3996]
    assert counter.history(5000.0, 10**9) == [2, 1, 0, 1, *[0] * 3996]
    assert len(counter.history(50_000.0, 10**9)) == KEPT_SECONDS

    new = ArrivalCounter(1000.0)
    assert (new.history(1000.9), new.peak(1000.9), new.history(1002.0)) == ([], 0, [0, 0])


def test_withdrawn_arrivals_are_no_load():
    counter = ArrivalCounter(1000.0)
    for moment in (1000.1, 1000.9, 1001.5):
        counter.record(moment)
    for moment in (1000.5, 1001.5, 1001.6, 990.0, 1002.5):
        counter.withdraw(moment)

    assert counter.history(1003.0) == [1, 0, 0]


def test_clock_set_back_creates_no_peak():
    counter = ArrivalCounter(1000.0)
    counter.record(1000.5, 7)
    for number in range(6000):
        counter.record(940.0 + number / 100)

    assert counter.peak(1001.5) == 100
    assert max(counter.history(1001.5)) == 100
    assert counter.history(1003.0)[-2:] == [0, 0]


def test_what_requests_bring_on_average():
    rows = PerRequestMean()
    assert rows.expected(0.0) == {}

    rows.record(1.0, {"locate": 1, "read": 3})
    rows.record(2.0, {"locate": 1})
    assert rows.expected(3.0) == {"locate": 1.0, "read": 1.5}
    rows.record(3.5, {"locate": 4})
    assert rows.expected(3.6) == {"locate": 2.0, "read": 1.0}
    assert rows.expected(61.9) == {"locate": 2.0, "read": 1.0}
    assert rows.expected(100.0) == {}


def brought(rates: Mapping[tuple[int, int], Sequence[int]], per_second: int = 20) -> PerRequestMean:
    rows = PerRequestMean()
    for (begin, end), amounts in rates.items():
        for number in range((end - begin) * per_second):
            rows.record(begin + number / per_second, {"encode": amounts[number % len(amounts)]})
    return rows


def test_rise_is_followed_in_5_seconds_and_fall_in_20():
    rows = brought({(0, 60): [0, 0, 1], (60, 66): [3], (66, 100): [0, 0, 1]})
    before, after = (brought({(0, 60): [0, 0, 1], (60, end): [3]}) for end in (66, 80))

    assert before.expected(66.0) == {"encode": pytest.approx(3.0, rel=0.15)}
    assert after.expected(80.0) == {"encode": pytest.approx(3.0, rel=0.15)}
    assert 1 / 3 < rows.expected(100.0)["encode"] < 0.5
    assert brought({(0, 60): [3], (60, 81): [0]}).expected(81.0)["encode"] < 0.25


def test_short_rise_is_followed_to_its_lower_bound():
    rows = brought({(0, 60): [0, 0, 1], (60, 62): [3]})
    minute = (58 / 3 + 6) / 60

    assert minute < rows.expected(62.0)["encode"] < (3 / 3 + 6) / 5


@pytest.mark.parametrize("per_second", [1, 3])
def test_a_few_requests_are_no_rise(per_second):
    rows = brought({(0, 60): [1], (60, 65): [3]}, per_second)
    assert rows.expected(65.0) == {"encode": pytest.approx((55 + 5 * 3) / 60)}


@pytest.mark.parametrize(("per_second", "rare"), [(1, 0.02), (2, 0.02), (20, 0.02), (20, 0.002)])
def test_wide_spread_is_not_taken_for_a_change(per_second, rare):
    shares = np.array([0.7, 0.3 - rare, rare])
    random, rows, strays = np.random.default_rng(7), PerRequestMean(), 0
    minute: deque[float] = deque(maxlen=60)
    for second in range(3600):
        drawn = random.choice([0.0, 1.0, 16.0], size=per_second, p=shares)
        for amount in drawn:
            rows.record(float(second), {"encode": amount})
        minute.append(drawn.mean())
        strays += rows.expected(second + 1.0)["encode"] != pytest.approx(np.mean(minute), rel=0.15)

    assert strays < 0.01 * 3600


def test_nothing_happened():
    assert RecentOutcomes().summary(100.0) == RecentRequests(
        received=0, ok=0, late=0, dropped=0, refused=0, failed=0, p99_seconds=None, accuracy=None
    )


def test_counts_quantile_and_accuracy_of_one_minute():
    recent = RecentOutcomes()
    latencies = np.random.default_rng(1).gamma(2.0, 0.02, 5000)
    for n, seconds in enumerate(latencies):
        now = 100.0 + n / 100
        recent.count_received(now)
        outcome = RequestOutcome.OK if n % 10 else RequestOutcome.LATE
        recent.record_response(now, outcome, seconds, 0.9 if n % 2 else 0.8)
    recent.count_received(149.0)
    recent.count_outcome(149.5, RequestOutcome.DROPPED)

    body = recent.summary(150.0)

    assert (body.received, body.ok, body.late, body.dropped) == (5001, 4500, 500, 1)
    assert body.p99_seconds == pytest.approx(np.quantile(latencies, 0.99), rel=0.05)
    assert body.accuracy == pytest.approx(0.85)


def test_what_is_older_is_forgotten():
    recent = RecentOutcomes()
    for second in range(1000):
        recent.count_received(second + 0.5)
        recent.record_response(second + 0.5, RequestOutcome.OK, 0.01, 0.9)

    assert recent.summary(1000.0).received == 60
    assert recent.summary(1030.0).received == 30
    assert recent.summary(2000.0).p99_seconds is None


def test_cpu_time_of_a_request_is_that_of_the_last_minute():
    usage = CpuUsage()
    assert usage.sample(0.0, 1.0, 0) is None
    assert usage.sample(4.0, 3.0, 1000) is None  # too short
    assert usage.sample(10.0, 3.0, 1000) == pytest.approx(0.002)
    assert usage.sample(60.0, 13.0, 3000) == pytest.approx(0.004)
    assert usage.sample(71.0, 15.2, 3200) == pytest.approx((15.2 - 13.0) / 200)  # since 60 s: the last minute's oldest


@pytest.mark.parametrize(("cpu_seconds", "requests"), [(0.5, 10), (9.0, 0)])
def test_idle_router_reports_no_cpu_time_of_a_request(cpu_seconds, requests):
    usage = CpuUsage()
    usage.sample(0.0, 0.0, 0)
    assert usage.sample(10.0, cpu_seconds, requests) is None
