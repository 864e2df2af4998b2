"""Envoy's counters of its own rejections, and load shedding: which share is rejected unread."""

import errno
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from aiohttp import web

from tests.router.envoy.http_clients import call, post
from tests.router.fakes import until
from trimtab.local.envoy_process import make_sockets
from trimtab_pipelines.documents import write_atomically
from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_pipelines.request_outcome import PROXY_REASONS
from trimtab_router.envoy.local_replies import local_replies
from trimtab_router.envoy.overload_controller import EnvoyAdmin
from trimtab_router.envoy.rejection_counters import (
    FREE_REJECTIONS_RPS,
    MAX_SHARE,
    LoadShedder,
    ProxyCounters,
    parse_local_replies,
    rejections_since,
)
from trimtab_router.limits import heap_bytes


def stats(*lines: str) -> dict[str, int]:
    return parse_local_replies("\n".join(f"proxy.answered.{line}" for line in lines))


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("detail.lua_response.status.401.reason.Unauthenticated: 2", {(401, "Unauthenticated"): 2}),
        ("detail.lua_response.status.200.reason.Unauthenticated: 2", {(401, "Unauthenticated"): 2}),  # over gRPC
        ("detail.lua_response.status.200.reason.Forbidden: 1", {(403, "Forbidden"): 1}),
        ("detail.local_rate_limited.status.200.reason.ClientRateLimited: 4", {(429, "ClientRateLimited"): 4}),
        (
            "detail.upstream_reset_before_response_started{overflow}.status.200.reason.Overload: 9",
            {(429, "Overload"): 9},
        ),
        (
            "detail.upstream_reset_before_response_started{connection_failure}.status.503.reason.: 1",
            {(503, "RouterUnavailable"): 1},
        ),
        ("detail.http1.codec_error.status.400.reason.: 1", {(400, "Malformed"): 1}),
        ("detail.request_header_timeout.status.408.reason.: 1", {(408, "RequestTimeout"): 1}),
        ("detail.http2.header_list_size_too_large.status.0.reason.: 3", {(431, "HeadersTooLarge"): 3}),  # reset, untold
        ("detail.downstream_remote_disconnect.status.0.reason.: 3", {}),
        ("detail.via_upstream.status.200.reason.: 5", {}),
        ("detail.via_upstream.status.429.reason.Overload: 5", {}),  # the router counted it
        ("detail.response_timeout.status.504.reason.Timeout: 5", {}),
        ("detail.upstream_max_stream_duration_reached.status.200.reason.: 1", {}),  # a health watch that had its time
    ],
)
def test_a_refusal_is_counted_by_its_reason_over_both_protocols(line: str, refused: dict[tuple[int, str], int]):
    assert rejections_since({}, stats(line)) == refused


def test_counter_increases_and_restarts_are_counted():
    line = "detail.lua_response.status.200.reason.Forbidden: {}"

    assert rejections_since(stats(line.format(3)), stats(line.format(5))) == {(403, "Forbidden"): 2}
    assert rejections_since(stats(line.format(5)), stats(line.format(5))) == {}
    assert rejections_since(stats(line.format(5)), stats(line.format(1))) == {(403, "Forbidden"): 1}


def test_every_proxy_reason_is_counted():
    headers = [
        header["header"]["value"]
        for mapper in local_replies(1000, 16)["mappers"]
        for header in mapper["headers_to_add"]
        if header["header"]["key"] == "x-trimtab-reason"
    ]

    assert set(headers) - {"Timeout"} == set(PROXY_REASONS), json.dumps(headers)


class FakeEnvoy:
    """Envoy's administration: counters that grow until it is started anew."""

    def __init__(self) -> None:
        self.refused = 0
        self._runner: web.ServerRunner | None = None

    async def start(self, socket: Path) -> None:
        self._runner = web.ServerRunner(web.Server(self._answer))
        await self._runner.setup()
        await web.UnixSite(self._runner, str(socket)).start()

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        assert request.path == "/stats"
        line = f"proxy.answered.detail.lua_response.status.401.reason.Unauthenticated: {self.refused}"
        return web.Response(text=line + "\n")


@pytest.mark.parametrize("note", [None, "[]", '{"x": "y"}', "\x00"])
async def test_restarted_router_counts_only_new_rejections(note: str | None):
    sockets, door, counted = make_sockets(), FakeEnvoy(), Counter[tuple[int, str]]()
    if note is not None:
        sockets.counters_file.write_text(note)
    await door.start(sockets.envoy_admin)
    for refused in (3, 5, 5):  # a router each; the door outlives them
        door.refused = refused
        envoy = EnvoyAdmin(sockets.envoy_admin, sockets.counters_file, counted.update, heap_bytes(EdgeSettings()))
        await envoy.sync_counters()
        await envoy.sync_counters()
        await envoy.close()
    await door.stop()
    shutil.rmtree(sockets.folder)

    assert counted == {(401, "Unauthenticated"): 5}


async def test_full_disk_loses_no_counted_rejection(monkeypatch, caplog):
    def fail(path: Path, _: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("trimtab_router.envoy.overload_controller.write_atomically", fail)
    sockets, proxy, counted = make_sockets(), FakeEnvoy(), Counter[tuple[int, str]]()
    await proxy.start(sockets.envoy_admin)
    envoy = EnvoyAdmin(sockets.envoy_admin, sockets.counters_file, counted.update, heap_bytes(EdgeSettings()))
    for proxy.refused in (3, 5):
        await envoy.sync_counters()
    await envoy.close()
    await proxy.stop()
    shutil.rmtree(sockets.folder)

    assert counted == {(401, "Unauthenticated"): 5}
    assert "No space left on device" in caplog.text


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
    counted = [ProxyCounters(tenths / 10, 150 * tenths, 1350 * tenths, 1500 * tenths) for tenths in (1, 2, 10)]

    assert {shedding.share(counters) for counters in counted} == {0.87}


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
