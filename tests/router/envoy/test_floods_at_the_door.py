"""In a flood most callers are refused before the door reads what they ask: how many, and what they are told."""

import pytest

from tests.router.envoy.callers import call, post
from tests.router.fakes import FakeReplica, a_pipeline, a_rig, until
from trimtab_pipelines.documents import write_atomically
from trimtab_router.envoy.load_shedding import MOST, READ_REFUSALS_RPS, LoadShedder, ProxyCounters


@pytest.mark.parametrize(
    ("answered", "refused", "came", "wanted"),
    [
        (0, 0, 0, 0.0),
        (1000, 0, 1000, 0.0),
        (1000, round(READ_REFUSALS_RPS), 1500, 0.0),
        (1000, 2000, 3000, 0.5),
        (1500, 13_500, 15_000, 0.87),
        (0, 10_000, 10_000, 0.95),
        (0, 1_000_000, 1_000_000, MOST),
    ],
)
def test_as_many_are_read_as_fill_the_room_and_some_more(answered, refused, came, wanted):
    shedding = LoadShedder(ProxyCounters(10.0, 50, 70, 0))

    assert shedding.share(ProxyCounters(11.0, 50 + answered, 70 + refused, came)) == wanted


def test_the_share_stays_where_it_is_while_the_flood_does():
    """It follows from what came, however often that is counted, and whatever was refused unread of it."""
    shedding = LoadShedder(ProxyCounters(0.0, 0, 0, 0))

    assert {
        shedding.share(ProxyCounters(tenths / 10, 150 * tenths, 1350 * tenths, 1500 * tenths)) for tenths in (1, 2, 10)
    } == {0.87}


def test_a_moment_without_answers_does_not_shut_the_door():
    """Answers come in batches, and a door that is behind brings few: what was answered of late says what can be."""
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
def test_nobody_is_refused_unread_where_nothing_is_gained(counted):
    assert LoadShedder(ProxyCounters(1.0, 0, 0, 0)).share(counted) == 0.0


async def test_who_is_refused_unread_is_told_why_and_counted():
    async with a_rig(a_pipeline(1), {"stage-0": [FakeReplica()]}) as rig:
        answered = [await post(rig)]
        assert rig.sockets is not None
        write_atomically(rig.sockets.pressure, "1.0")  # as the router does in a flood, but of everybody
        while answered[-1].status == 200:
            assert len(answered) < 1000
            answered.append(await post(rig))

        assert (answered[-1].status, answered[-1].headers["x-trimtab-reason"]) == (429, "Overload")
        assert answered[-1].headers["retry-after"] == "1"
        assert "overloaded" in answered[-1].error
        assert (await call(rig)).startswith("RESOURCE_EXHAUSTED: the router is overloaded")
        assert rig.doors.envoy is not None
        await rig.doors.envoy.catch_up()
        assert rig.doors.envoy.refused_for_room == 2
        assert await rig.outcomes() == {"ok": len(answered) - 1, "refused": 2}


async def test_a_door_that_comes_back_is_told_its_bound_again():
    """Else it would keep the one it starts with for as long as the router's window stays the same."""
    async with a_rig(a_pipeline(1), {"stage-0": [FakeReplica()]}) as rig:
        await rig.door()
        assert rig.doors.envoy is not None
        told: list[int] = []
        tell = rig.doors.envoy.bound

        async def bound(most_under_way: int) -> None:
            told.append(most_under_way)
            await tell(most_under_way)

        rig.doors.envoy.bound = bound  # type: ignore[method-assign]
        await until(lambda: len(told) >= 2)
        assert told[0] == told[1] == rig.router.pacer.window.limit
