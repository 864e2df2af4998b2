"""Routed chats: a rejection, or a stream with only an error, has no first token."""

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.chats_routed import DIRECT, ROUTED, Route, StreamMeasurements, judge, read_stream
from benchmarks.harness.report import Report
from trimtab_training.lmm_digits.questions import Chat, Kind

QUESTION = Chat(Kind.SUM, b'[{"role": "user", "content": "What is 7 plus 5?"}]', (), "12")
ERROR = b'data: {"error": {"message": "the replica is gone"}}\n\ndata: [DONE]\n\n'
TEXT = b'data: {"choices": [{"delta": {"content": "12"}}]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(("body", "first_tokens", "empty"), [(ERROR, 0, 1), (TEXT, 1, 0)])
async def test_stream_with_only_an_error_has_no_first_token(body, first_tokens, empty):
    async def answer(_request):
        return web.Response(body=body)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    measurements = StreamMeasurements()
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        route = Route(str(server.make_url("/v1/chat/completions")), "lmm", session, direct=False, output_tokens=(1, 2))
        await read_stream(route, QUESTION, 2, measurements, counts=True)

    assert (len(measurements.first_seconds), measurements.empty) == (first_tokens, empty)
    assert all(0 < seconds < 30 for seconds in measurements.first_seconds)


def report_of(direct, routed):
    report = Report("chats-routed")
    judge("small model", ROUTED, {DIRECT: direct, ROUTED: routed}, report)
    return report


@pytest.mark.parametrize("empty", [0, 3])
def test_comparison_without_responses_holds_nothing(empty):
    unanswered = StreamMeasurements(wall_seconds=1.0, empty=empty)
    fast = StreamMeasurements(first_seconds=[0.01] * 9, events=9, wall_seconds=1.0)

    assert report_of(fast, fast).holds
    for direct, routed in ((unanswered, unanswered), (fast, unanswered), (unanswered, fast)):
        assert not report_of(direct, routed).holds


def test_router_overhead_has_a_confidence_interval():
    direct = StreamMeasurements(first_seconds=[0.010] * 40, round_ends=[20, 40], wall_seconds=1.0)
    slower = StreamMeasurements(first_seconds=[0.012] * 20 + [0.030] * 20, round_ends=[20, 40], wall_seconds=1.0)
    silent = StreamMeasurements(first_seconds=[0.012] * 20, round_ends=[20, 20], wall_seconds=1.0)
    figures = report_of(direct, slower).figures
    name = f"small model: {ROUTED}: added first token p99 ms"

    assert (figures[f"{name}, low"], figures[f"{name}, high"]) == (2.0, 20.0)
    assert f"{name}, low" not in report_of(direct, silent).figures
