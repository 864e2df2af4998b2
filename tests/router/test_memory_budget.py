"""Memory budget: bytes of requests, responses and clients."""

import asyncio
import gc
import time
import weakref
from functools import partial

import pytest

from tests.router.fakes import FakeReplica, a_pipeline, a_request, a_rig
from trimtab_pipelines.edge_settings import ClientLimits, EdgeSettings
from trimtab_pipelines.request_outcome import ErrorCode
from trimtab_router.admission.admission import Admission
from trimtab_router.admission.memory_budget import LARGE_BYTES, MemoryBudget
from trimtab_router.limits import SMALL_BYTES, Limits
from trimtab_router.refusal import Refusal


def test_a_reservation_grows_and_ends_once():
    budget = MemoryBudget(100)
    with budget.reservation() as one, budget.reservation() as other:
        one.grow(60)
        with pytest.raises(Refusal, match="60 bytes are in flight and 41 more do not fit below 100"):
            other.grow(41)
        other.grow(40)
        other.record(50)  # what is there is there
        assert (budget.bytes_in_flight, budget.requests) == (150, 2)
        one.mark_served()
        assert (budget.bytes_in_flight, budget.requests) == (150, 1)
        one.end()

    one.record(5)
    assert (budget.bytes_in_flight, budget.requests) == (0, 0)


def test_client_quotas_are_independent():
    budget = MemoryBudget(1000, max_client_requests=2, max_client_bytes=100)
    first, second = budget.reservation("a"), budget.reservation("a")
    with pytest.raises(Refusal) as caught:
        budget.reservation("a")
    assert (caught.value.code, caught.value.reason) == (ErrorCode.RESOURCE_EXHAUSTED, "ClientConcurrencyLimited")
    assert caught.value.client_error

    first.grow(60)
    with pytest.raises(Refusal) as caught:
        second.grow(50)
    assert (caught.value.reason, caught.value.retry_after_seconds) == ("ClientBytesLimited", 1.0)
    assert (second.size_bytes, budget.bytes_in_flight) == (0, 60)

    for _ in range(5):  # an unknown client has no bounds of its own
        budget.reservation("").grow(100)
    other = budget.reservation("b")
    other.grow(100)
    first.end()
    second.grow(100)
    for reservation in (second, other):
        reservation.end()
    assert len(budget.clients) == 0, "only clients with requests in flight are kept"


def test_unread_responses_are_aborted_oldest_first():
    budget, cut = MemoryBudget(100, max_client_bytes=1000), list[str]()
    slow = [budget.reservation("a") for _ in range(3)]
    for name, reservation in zip("abc", slow, strict=True):
        reservation.grow(40)
        reservation.hold_response(60, partial(cut.append, name))

    assert cut == ["a", "b"]
    assert (budget.bytes_in_flight, budget.requests) == (60, 0)
    with budget.reservation() as one:
        one.grow(100)
        assert budget.bytes_in_flight == 160
    large = budget.reservation()
    large.hold_response(500, lambda: cut.append("large"))  # the newest is let be, however large
    assert cut == ["a", "b", "c"]

    for reservation in (*slow, large):
        reservation.end()
    assert budget.bytes_in_flight == 0


def test_large_requests_leave_room_for_small_ones():
    budget = MemoryBudget(100 * SMALL_BYTES)
    with budget.reservation() as large, budget.reservation() as small:
        large.grow(75 * SMALL_BYTES)
        with pytest.raises(Refusal, match="in flight and 1 more do not fit below 19660800"):
            large.grow(1)
        large.record(50 * SMALL_BYTES)  # as its stages' outputs are
        small.grow(SMALL_BYTES)
        with pytest.raises(Refusal):
            small.grow(1)  # it is small no more
    assert budget.bytes_in_flight == 0
    with budget.reservation() as whole:
        whole.grow(SMALL_BYTES)


async def test_requests_beyond_client_quota_are_not_planned_for():
    replica, bounds = FakeReplica(), ClientLimits(concurrency=2, in_flight=10_000)
    async with a_rig(a_pipeline(1), {"stage-0": [replica]}, edge=EdgeSettings(clients=bounds)) as rig:
        first = await rig.hold(replica)  # of an unknown client
        mine = asyncio.ensure_future(rig.rest(a_request(), **{"x-trimtab-client": "me"}))
        await rig.until(lambda: rig.router.state().stages["stage-0"].queue_rows == 1)
        _, _, headers = await rig.rest(a_request(rows=1000), **{"x-trimtab-client": "me"})
        assert headers["x-trimtab-reason"] == "ClientBytesLimited"
        held = asyncio.ensure_future(rig.rest(a_request(), **{"x-trimtab-client": "me"}))
        await rig.until(lambda: rig.router.state().stages["stage-0"].queue_rows == 2)
        for _ in range(50):
            _, _, headers = await rig.rest(a_request(), **{"x-trimtab-client": "me"})
            assert headers["x-trimtab-reason"] == "ClientConcurrencyLimited"
        replica.gate.set()

        assert [(await call)[0] for call in (first, mine, held)] == [200] * 3
        assert await rig.outcomes() == {"ok": 3, "refused": 51}
        assert sum(rig.router.arrivals.history(time.time() + 1.0, 600)) == 3


def test_only_large_requests_trigger_collection():
    body = list[str]()
    budget = MemoryBudget(100 * LARGE_BYTES, on_large_end=lambda: body.append("large"))
    with budget.reservation() as small:
        small.grow(LARGE_BYTES)
    assert not body

    with budget.reservation() as large:
        large.grow(LARGE_BYTES + 1)
    with budget.reservation() as answered:
        answered.hold_response(LARGE_BYTES + 1, lambda: None)

    assert body == ["large", "large"]


async def test_a_body_held_in_a_cycle_is_gone_soon_after_its_request():
    class Held:
        """What an exception's frames hold of a request that was cut short."""

    gc.disable()
    try:
        held = Held()
        held.__dict__["itself"], gone = held, asyncio.Event()
        weakref.finalize(held, gone.set)
        del held
        admission = Admission(a_pipeline(1), Limits(), lambda: None)
        for _ in range(2):
            with await admission.admit(time.monotonic()) as reservation:
                reservation.grow(LARGE_BYTES + 1)

        await asyncio.wait_for(gone.wait(), 5.0)
        admission.close()
    finally:
        gc.enable()
