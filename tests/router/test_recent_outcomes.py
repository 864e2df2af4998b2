"""Outcomes of the requests of the last minute."""

import numpy as np
import pytest

from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.router_state import RecentRequests
from trimtab_router.observability.arrivals import RecentOutcomes


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
        recent.count_outcome(now, RequestOutcome.OK if n % 10 else RequestOutcome.LATE)
        recent.record_response(now, seconds, 0.9 if n % 2 else 0.8)
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
        recent.record_response(second + 0.5, 0.01, 0.9)

    assert recent.summary(1000.0).received == 60
    assert recent.summary(1030.0).received == 30
    assert recent.summary(2000.0).p99_seconds is None
