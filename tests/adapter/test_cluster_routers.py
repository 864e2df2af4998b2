"""Loads of several routers: summed second by second, honest about those that do not answer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tests.adapter.clusters import a_slice
from tests.adapter.scenes import FakeRouter
from tests.processes import own_address
from trimtab_adapter.cluster.config_source import ClusterCache
from trimtab_adapter.cluster.router_metrics_source import Address, RouterMetricsSource, addresses, merge_loads
from trimtab_adapter.load_sources import RouterSource
from trimtab_adapter.observation import Load, State, merge_states
from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_pipelines.router_state import RecentRequests
from trimtab_predictor.context import MEMORY_SECONDS
from trimtab_predictor.load_history import ObservationError
from trimtab_predictor.metrics_client import open_session

NOW = 10_000.0


def knowing(*ports: int, **conditions: bool) -> ClusterCache:
    known = ClusterCache()
    for one in a_slice("here", "sample", list(ports), **conditions):
        known.put(one)
    return known


@asynccontextmanager
async def two_routers() -> AsyncIterator[tuple[FakeRouter, FakeRouter, RouterMetricsSource]]:
    async with (
        FakeRouter().serve(host="0.0.0.0") as one,
        FakeRouter().serve(host="0.0.0.0") as other,
        open_session(2.0) as client,
    ):
        yield one, other, RouterMetricsSource(client, knowing(port_of(one), port_of(other)), ("here", "sample"))


def port_of(router: FakeRouter) -> int:
    return int(router.url.rpartition(":")[2])


def test_seconds_are_summed_from_the_newest_backwards():
    young, old = Load(NOW, (5.0, 6.0)), Load(NOW, (1.0, 2.0, 3.0))

    assert merge_loads([young, old], NOW) == (1.0, 7.0, 9.0)
    assert merge_loads([Load(NOW, (0.0,) * 3), old], NOW) == (1.0, 2.0, 3.0)


def test_a_router_that_is_gone_counts_in_the_past_only():
    gone, new = Load(NOW - 2, (4.0, 4.0, 4.0)), Load(NOW, (7.0,))

    assert merge_loads([gone, new], NOW) == (4.0, 4.0, 4.0, 0.0, 7.0)
    assert len(merge_loads([Load(NOW - 599, (1.0,) * 600), new], NOW)) == 1199
    assert len(merge_loads([Load(NOW - 599, (1.0,) * MEMORY_SECONDS), new], NOW)) == MEMORY_SECONDS


def test_routers_that_end_are_asked_but_not_waited_for():
    ready, ending = a_slice("here", "sample", [1])[0], a_slice("here", "sample", [2], ready=False, serving=True)[0]
    dead = a_slice("here", "sample", [3], ready=False, serving=False)[0]

    assert addresses([ready, ending, dead, ready]) == [
        Address(f"http://{own_address()}:1", ready=True),
        Address(f"http://{own_address()}:2", ready=False),
    ]


async def test_every_router_is_asked_for_as_much_as_is_wanted():
    async with two_routers() as (early, late, source):
        early.load["rps"], late.load["rps"] = [3.0] * 5000, [4.0] * 5000
        early.load["current"], late.load["current"] = 5.0, 6.0
        late.status = 503
        first = await source.load(NOW, MEMORY_SECONDS)
        late.status = 200
        second = await source.load(NOW + 10)
        whole = await source.load(NOW + 20, MEMORY_SECONDS)

    assert first.history_rps == (3.0,) * 5000
    assert second.history_rps == (7.0,) * 600
    assert whole.history_rps == (7.0,) * 5000
    assert (first.sliding_rps, second.sliding_rps) == (8.0, 18.0)


async def test_a_router_that_does_not_answer_makes_the_sum_partial():
    async with two_routers() as (well, ill, source):
        whole = await source.load(NOW)
        ill.status = 503
        part = await source.load(NOW + 1)
        well.status = 503
        with pytest.raises(ObservationError, match="returned 503") as none:
            await source.load(NOW + 2)

    assert whole.peak_rps == 10.0
    assert whole.missing == ""
    assert part.missing == f"no response from http://{own_address()}:{port_of(ill)}"
    assert part.history_rps[-2:] == (10.0, 5.0)
    assert none.value.fault == "Missing"


async def test_absurd_counts_of_one_router_are_no_sum():
    async with two_routers() as (_, ill, source):
        ill.load = {"now": 1.0, "rps": [-1.0]}
        with pytest.raises(ObservationError, match="expected 0 to") as refused:
            await source.load(NOW)

    assert refused.value.fault == "Absurd"


@pytest.mark.parametrize("body", ["<html>", "[" * 200_000], ids=["HTML", "nested too deeply"])
async def test_response_that_is_not_json_is_rejected(body):
    async with FakeRouter().serve() as router, open_session(2.0) as session:
        router.load = body
        with pytest.raises(ObservationError, match="returned invalid JSON"):
            await RouterSource(session, router.url).load(NOW)


async def test_unreachable_router_is_named():
    async with open_session(2.0) as session:
        address = "http://127.0.0.1:9"  # discard: nothing listens there
        with pytest.raises(ObservationError, match=f"{address}/trimtab/v1/arrivals cannot be reached") as rejected:
            await RouterSource(session, address).load(NOW)

    assert rejected.value.fault == "Missing"


async def test_no_router_at_all_is_said():
    async with open_session(2.0) as client:
        with pytest.raises(ObservationError, match="no router is ready behind Service here/sample-router-admin"):
            await RouterMetricsSource(client, ClusterCache(), ("here", "sample")).load(NOW)


def test_states_are_averaged_and_outcomes_added():
    ninety = RecentRequests(received=100, ok=90, p99_seconds=0.2, accuracy=0.9)
    ten = RecentRequests(received=20, ok=10, p99_seconds=0.5, accuracy=0.8)
    new, newer = ({("a", "v", "p"): {task: Accuracy(value=0.5)}} for task in ("new", "newer"))
    one = State({"a": 2.0}, {("a", "v"): 1.0}, ninety, prompt_tokens={"a": 100.0}, registered_accuracies=new)
    two = State({"a": 4.0}, {("a", "v"): 2.0}, ten, prompt_tokens={"a": 200.0}, registered_accuracies=newer)
    one, two = replace(one, router_cpu_seconds=0.002), replace(two, router_cpu_seconds=0.004)

    merged = merge_states([one, two, State()])

    assert merged.rows_per_request == {"a": 3.0}
    assert merged.service_ratios == {("a", "v"): 1.5}
    assert merged.prompt_tokens == {"a": 150.0}
    assert merged.registered_accuracies["a", "v", "p"].keys() == {"new", "newer"}
    assert merged.router_cpu_seconds == pytest.approx(0.003)  # one without a measurement counts as none
    assert merged.served is not None
    assert (merged.served.received, merged.served.answered, merged.served.p99_seconds) == (120, 100, 0.5)
    assert merged.served.accuracy == pytest.approx(0.89)
    assert merge_states([State()]).served is None
