"""Time to first token of a chat: a refusal or a stream with only an error has none."""

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.chats.through import ALONE, ROUTED, Heard, Way, bars_of, listen, overhead_figures
from trimtab_training.lmm_digits.chat_samples import Chat
from trimtab_training.lmm_digits.questions import Kind

QUESTION = Chat(Kind.SUM, b'[{"role": "user", "content": "What is 7 plus 5?"}]', (), "12")
ERROR = b'data: {"error": {"message": "the replica is gone"}}\n\ndata: [DONE]\n\n'


def a_server(status, body):
    async def answer(_request):
        return web.Response(status=status, body=body)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    return TestServer(app)


async def listened_to(body):
    heard = Heard()
    async with a_server(200, body) as server, aiohttp.ClientSession() as session:
        way = Way(str(server.make_url("/v1/chat/completions")), "lmm", session, inner=False, words=(1, 2))
        await listen(way, QUESTION, 2, heard, counts=True)
    return heard


async def test_stream_with_only_an_error_has_no_first_token():
    heard = await listened_to(ERROR)

    assert (heard.first_seconds, heard.wordless) == ([], 1)


async def test_first_token_of_a_stream_is_timed():
    heard = await listened_to(b'data: {"choices": [{"delta": {"content": "12"}}]}\n\ndata: [DONE]\n\n')

    assert len(heard.first_seconds) == 1
    assert 0 < heard.first_seconds[0] < 30
    assert heard.wordless == 0


@pytest.mark.parametrize("wordless", [0, 3])
def test_a_comparison_without_answers_holds_nothing(wordless):
    unanswered = Heard(wordless=wordless)
    fast = Heard(first_seconds=[0.01] * 9, pieces=9)

    assert all(one.holds for one in bars_of("both", fast, fast))
    for alone, other in ((unanswered, unanswered), (fast, unanswered), (unanswered, fast)):
        assert not all(one.holds for one in bars_of("one", alone, other))


def test_router_overhead_has_a_confidence_interval():
    alone = Heard(first_seconds=[0.010] * 40, round_ends=[20, 40], wall_seconds=1.0)
    calm_then_late = Heard(first_seconds=[0.012] * 20 + [0.030] * 20, round_ends=[20, 40], wall_seconds=1.0)
    figures = overhead_figures(ROUTED, {ALONE: alone, ROUTED: calm_then_late})

    low, high = (figures[f"{ROUTED}: first token p99, ms more, {bound}"] for bound in ("low", "high"))
    assert (low, high) == (2.0, 20.0)
    silent = Heard(first_seconds=[0.012] * 20, round_ends=[20, 20], wall_seconds=1.0)
    names = overhead_figures(ROUTED, {ALONE: alone, ROUTED: silent})
    assert not [name for name in names if name.endswith(("low", "high"))]
