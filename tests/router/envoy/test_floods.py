"""Load shedding: share of requests rejected unread, and what clients receive."""

import pytest

from tests.router.envoy.http_clients import call, post
from tests.router.fakes import until
from trimtab_pipelines.documents import write_atomically
from trimtab_router.envoy.rejection_counters import FREE_REJECTIONS_RPS, MAX_SHARE, LoadShedder, ProxyCounters


@pytest.mark.parametrize(
    ("answered", "refused", "came", "wanted"),
    [
        (0, 0, 0, 0.0),
        (1000, 0, 1000, 0.0),
        (1000, round(FREE_REJECTIONS_RPS), 1500, 0.0),
        (1000, 2000, 3000, 0.5),
        (1500, 13_500, 15_000, 0.87),
        (0, 10_000, 10_000, 0.95),
        (0, 1_000_000, 1_000_000, MAX_SHARE),
    ],
)
def test_as_many_are_read_as_fill_the_room_and_some_more(answered, refused, came, wanted):
    shedding = LoadShedder(ProxyCounters(10.0, 50, 70, 0))

    assert shedding.share(ProxyCounters(11.0, 50 + answered, 70 + refused, came)) == wanted


def test_the_share_stays_where_it_is_while_the_flood_does():
    shedding = LoadShedder(ProxyCounters(0.0, 0, 0, 0))

    assert {
        shedding.share(ProxyCounters(tenths / 10, 150 * tenths, 1350 * tenths, 1500 * tenths)) for tenths in (1, 2, 10)
    } == {0.87}


def test_short_response_gap_does_not_reject_everything():
    shedding = LoadShedder(ProxyCounters(0.0, 0, 0, 0))
    assert shedding.share(ProxyCounters(0.1, 150, 1350, 1500)) == 0.87

    assert shedding.share(ProxyCounters(0.2, 150, 2850, 3000)) == 0.87
    assert shedding.share(ProxyCounters(1.2, 150, 17_850, 18_000)) == 0.97


@pytest.mark.parametrize(
    "counted",
    [
        pytest.param(ProxyCounters(1.0, 10, 10_000, 10_000), id="no time went by"),
        pytest.param(ProxyCounters(2.0, 1000, 20_000, 900), id="the flood comes over HTTP/1.1"),
        pytest.param(
            ProxyCounters(2.0, 1000, 0, 50_000), id="there is room: what is refused is refused for other reasons"
        ),
        pytest.param(ProxyCounters(2.0, 1000, 20_000, -50_000), id="the door began anew"),
    ],
)
def test_nothing_is_rejected_unread_at_low_load(counted):
    assert LoadShedder(ProxyCounters(1.0, 0, 0, 0)).share(counted) == 0.0


async def test_unread_rejections_have_a_reason_and_are_counted(rig):
    answered = [await post(rig)]
    write_atomically(rig.sockets.pressure, "1.0")  # as the router does in a flood, but of all requests
    while answered[-1].status == 200:
        assert len(answered) < 1000
        answered.append(await post(rig))

    assert (answered[-1].status, answered[-1].headers["x-trimtab-reason"]) == (429, "Overload")
    assert answered[-1].headers["retry-after"] == "1"
    assert "overloaded" in answered[-1].error
    assert (await call(rig)).startswith("RESOURCE_EXHAUSTED: the router is overloaded")
    await rig.listeners.envoy.sync_counters()
    assert rig.listeners.envoy.overload_rejections == 2
    assert await rig.outcomes() == {"ok": len(answered) - 1, "refused": 2}


async def test_restarted_envoy_gets_its_limit_again(rig):
    await rig.proxy()
    body = []
    tell = rig.listeners.envoy.set_limits

    async def set_limits(max_in_flight):
        body.append(max_in_flight)
        await tell(max_in_flight)

    rig.listeners.envoy.set_limits = set_limits
    await until(lambda: len(body) >= 2)
    assert body[0] == body[1] == rig.router.admission.concurrency.concurrency_limit.limit
