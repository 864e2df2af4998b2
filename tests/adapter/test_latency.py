"""Waiting and replicas: the formulas' values, and what must hold of them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_adapter import latency


def test_the_published_form_adds_the_fill_delay():
    assert latency.published_seconds(0.1, batch_size=8, load_rps=20) == pytest.approx(0.1 + 7 / 20)
    assert latency.published_seconds(0.1, batch_size=1, load_rps=0) == 0.1
    assert latency.fill_delay_seconds(2, 0.0) == math.inf


def test_one_busy_replica_makes_wait_almost_a_whole_batch_and_many_much_less():
    assert latency.busy_wait_seconds(0.1, 1, 0.99) == pytest.approx(0.099)
    assert latency.busy_wait_seconds(0.1, 4, 0.99) == pytest.approx(0.1 * (1 - 0.01**0.25))


def test_an_overloaded_stage_waits_for_ever():
    assert latency.backlog_seconds(100.0, 100.0, 0.99) == math.inf
    assert latency.planned_seconds(0.1, 1, 120.0, 100.0, 0.99) == math.inf


@pytest.mark.parametrize(("load_rps", "replicas"), [(0.0, 1), (8.0, 1), (8.01, 2), (16.0, 2), (80.0, 10)])
def test_least_replicas_keep_the_utilisation_margin(load_rps, replicas):
    assert latency.least_replicas(load_rps, replica_rps=10.0) == replicas


@given(st.floats(1e-4, 10), st.integers(1, 60), st.floats(0, 500), st.floats(0.1, 1000), st.floats(0.5, 0.999))
def test_latency_falls_with_replicas_and_rises_with_load(service, replicas, load_rps, replica_rps, quantile):
    throughput = replicas * replica_rps
    planned = latency.planned_seconds(service, replicas, load_rps, throughput, quantile)
    more = latency.planned_seconds(service, replicas + 1, load_rps, throughput + replica_rps, quantile)
    busier = latency.planned_seconds(service, replicas, load_rps * 1.1, throughput, quantile)

    assert service <= more <= planned <= busier


@given(st.floats(0, 1e4), st.floats(0.1, 1e4))
def test_least_replicas_carry_the_load_and_one_fewer_does_not(load_rps, replica_rps):
    replicas = latency.least_replicas(load_rps, replica_rps)
    carried = latency.MOST_UTILISATION * replica_rps

    assert replicas * carried >= load_rps * (1 - 1e-6)
    assert replicas == 1 or (replicas - 1) * carried < load_rps
