"""Waiting and replicas: the formulas' values, and what must hold of them."""

import heapq
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_adapter.planning import latency


def test_wait_shrinks_with_more_busy_replicas():
    assert latency.busy_wait_seconds(0.1, 1, 0.99) == pytest.approx(0.099)
    assert latency.busy_wait_seconds(0.1, 4, 0.99) == pytest.approx(0.1 * (1 - 0.01**0.25))


def test_an_overloaded_stage_waits_for_ever():
    assert latency.backlog_seconds(100.0, 100.0, 0.99) == math.inf
    assert latency.planned_seconds(0.1, 1, math.inf, 0.99) == math.inf


def test_rows_that_come_together_wait_for_each_other():
    assert latency.backlog_seconds(0.0, 10.0, 0.99, rows_together=3.0) == pytest.approx(0.4)
    assert latency.backlog_seconds(5.0, 10.0, 0.99, 3.0) > 3 * latency.backlog_seconds(5.0, 10.0, 0.99)


@given(st.floats(1e-4, 10), st.integers(1, 60), st.floats(0, 500), st.floats(0.1, 1000), st.floats(0.5, 0.999))
def test_latency_falls_with_replicas_and_rises_with_load(service, replicas, load_rps, replica_rps, quantile):
    def planned(n, load):
        backlog = latency.backlog_seconds(load, n * replica_rps, quantile)
        return latency.planned_seconds(service, n, backlog, quantile)

    assert service <= planned(replicas + 1, load_rps) <= planned(replicas, load_rps)
    assert planned(replicas, load_rps) <= planned(replicas, load_rps * 1.1)


@given(st.floats(0, 1e4), st.floats(0.1, 1e4), st.floats(0.1, 1))
def test_least_replicas_carry_the_load_and_one_fewer_does_not(load_rps, replica_rps, utilisation):
    replicas = latency.required_replicas(load_rps, replica_rps, utilisation)
    carried = utilisation * replica_rps

    assert replicas * carried >= load_rps * (1 - 1e-6)
    assert replicas == 1 or (replicas - 1) * carried < load_rps


@pytest.mark.parametrize("load_rps", [1.0, 4.0, 30.0, 300.0])
@pytest.mark.parametrize("seconds", [10, 20])
def test_sustained_load_reproduces_the_peak_of_poisson_arrivals(load_rps, seconds):
    peaks = np.random.default_rng(5).poisson(load_rps, (4000, seconds)).max(axis=1)

    assert latency.sustained_load_rps(float(peaks.mean()), seconds) == pytest.approx(load_rps, rel=0.12, abs=0.25)
    assert latency.sustained_load_rps(load_rps, 1.0) == pytest.approx(load_rps)
    assert latency.sustained_load_rps(0.0, seconds) == 0.0


def simulate(load_rps, service, batch_size, replicas, rows_together):
    """Simulate Poisson requests of equal rows on replicas that batch all queued rows; return each request's latency."""
    rng = np.random.default_rng(7)
    arrivals = np.cumsum(rng.exponential(rows_together / load_rps, 20_000))
    free = [0.0] * replicas
    finished = np.zeros(arrivals.size)
    rows = np.repeat(np.arange(arrivals.size), rows_together)
    at = 0
    while at < rows.size:
        start = max(heapq.heappop(free), arrivals[rows[at]])
        waiting = int(np.searchsorted(arrivals, start, side="right")) * rows_together
        taken = rows[at : min(at + batch_size, max(waiting, at + 1))]
        finish = start + service(len(taken))
        finished[taken] = np.maximum(finished[taken], finish)
        heapq.heappush(free, finish)
        at += len(taken)
    return finished - arrivals


@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize(("replicas", "rows_together"), [(1, 1), (1, 3), (2, 2), (4, 1)])
@pytest.mark.parametrize("utilisation", [0.3, 0.6, 0.8])
def test_planned_latency_is_kept_when_batches_are_played_out(batch_size, replicas, rows_together, utilisation):
    """What is planned at 99 % must hold for at least 98 % of requests, and not be wildly more than needed."""

    def service(rows):
        return 0.004 + 0.002 * rows

    throughput = replicas * batch_size / service(batch_size)
    load_rps = utilisation * throughput
    backlog = latency.backlog_seconds(load_rps, throughput, 0.99, rows_together)
    planned = latency.planned_seconds(service(batch_size), replicas, backlog, 0.99)
    seconds = simulate(load_rps, service, batch_size, replicas, rows_together)

    assert np.mean(seconds <= planned) >= 0.98
    assert planned <= 6 * np.quantile(seconds, 0.99)


def simulated_waits(load_rps, servers):
    """Waits of Poisson arrivals for the first free one of some servers, which each takes a second."""
    free, waits = [0.0] * servers, []
    for arrived in np.cumsum(np.random.default_rng(3).exponential(1.0 / load_rps, 100_000)).tolist():
        start = max(arrived, heapq.heappop(free))
        waits.append(start - arrived)
        heapq.heappush(free, start + 1.0)
    return np.array(waits)


@pytest.mark.parametrize("slots", [1, 4, 8, 32])
@pytest.mark.parametrize("utilisation", [0.5, 0.7, 0.85])
@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.99])
def test_wait_for_a_slot_is_that_of_a_simulated_queue(slots, utilisation, quantile):
    waits = simulated_waits(utilisation * slots, slots)
    planned = latency.slot_wait_seconds(utilisation * slots, float(slots), float(slots), quantile)

    assert planned == pytest.approx(np.quantile(waits, quantile), rel=0.25, abs=0.1)
    assert latency.slot_wait_seconds(slots * 1.0, float(slots), float(slots), quantile) == math.inf


@pytest.mark.parametrize("utilisation", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.99])
def test_prefill_is_planned_no_faster_than_in_a_simulated_queue(utilisation, quantile):
    seconds = np.quantile(simulated_waits(utilisation, 1) + 1.0, quantile)
    planned = latency.first_token_seconds(1.0, 100.0, 100.0, utilisation, quantile)

    assert 0.95 * seconds <= planned <= 2.5 * seconds


def test_prefill_is_of_one_prompt_to_a_full_batch():
    assert latency.first_token_seconds(0.1, 0.8, 8.0, 0.0, 0.99) == pytest.approx(0.1)
    assert latency.first_token_seconds(0.1, 0.8, 8.0, 2.0, 0.99) == pytest.approx(0.8)
    assert latency.first_token_seconds(0.1, 0.1, 1.0, 0.5, 0.99) == pytest.approx(0.1)
