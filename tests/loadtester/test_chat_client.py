"""`ChatClient`: requests as OpenAI clients send them, and times of streamed tokens."""

import asyncio
import base64
import json
import math
from contextlib import asynccontextmanager

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.loadtester.fake_pipeline import a_pipeline
from trimtab_loadtester.attack import AttackOptions, attack_async
from trimtab_loadtester.chat_client import BROKEN, PATH, ChatClient
from trimtab_loadtester.clients import OPEN, Access
from trimtab_loadtester.load_spec import LoadError, LoadSpec
from trimtab_loadtester.multimodal.traffic import draw
from trimtab_loadtester.payloads.interface import Payload, Score
from trimtab_loadtester.results import Results
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_protocol import Tensor

WORDS = ("1", "2", ".")
DONE = b"data: [DONE]\n\n"


def strings(*values):
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def a_chat(*images):
    content = [{"type": "image"} for _ in images] + [{"type": "text", "text": "What is 7 plus 5?"}]
    messages = json.dumps([{"role": "user", "content": content}]).encode()
    shown = (Tensor("images", "BYTES", strings(*images)[None]),) if images else ()
    return (Tensor("messages", "BYTES", strings(messages)), *shown)


def chunk(words="", finish=None):
    delta = {"content": words} if words else {}
    return b"data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": finish}]}).encode() + b"\n\n"


def sending(content):

    async def events(send):
        await send(content)

    return events


ANSWER = sending(chunk("12", finish="stop") + DONE)


class Clock:
    """Clock that a test advances, with an event for each reading."""

    def __init__(self):
        self.now = 100.0
        self.looked = asyncio.Event()

    def __call__(self):
        self.looked.set()
        return self.now


@asynccontextmanager
async def streaming(events, status=200):
    """Serve what `events(send)` streams; yield the address and the requests received."""
    asked = []

    async def answer(request):
        asked.append((await request.json(), request.headers.copy()))
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        await events(response.write)
        return response

    app = web.Application()
    app.router.add_post(PATH, answer)
    async with TestServer(app) as server:
        yield f"127.0.0.1:{server.port}", asked


async def answer_of(events, *, status=200, clock=None):
    async with streaming(events, status) as (address, _), ChatClient(address, "lmm", OPEN, clock or Clock()) as client:
        return await client.send(client.encode(a_chat(), ("text",), {}), "1-0")


def spoken(clock, seconds):
    """Stream of a role, then words with these delays; the last word and the end are sent together."""

    async def events(send):
        for delay, event in zip((0.0, *seconds), (chunk(), *map(chunk, WORDS)), strict=True):
            clock.looked.clear()
            clock.now += delay
            await send(event)
            await clock.looked.wait()
        await send(chunk(finish="stop") + DONE)

    return events


async def test_first_token_and_inter_token_times_are_measured():
    clock = Clock()
    answer = await answer_of(spoken(clock, (0.2, 0.05, 0.15)), clock=clock)

    assert answer.code == "200"
    assert answer.message.outputs[0].array.tolist() == [b"12."]
    assert answer.stream_timings.first_token_seconds == pytest.approx(0.2)
    assert answer.stream_timings.between_tokens_seconds == pytest.approx(0.1)


async def test_response_of_one_chunk_has_no_inter_token_time():
    answer = await answer_of(ANSWER)

    assert answer.stream_timings.first_token_seconds == 0.0
    assert math.isnan(answer.stream_timings.between_tokens_seconds)


@pytest.mark.parametrize(
    ("sent", "detail"),
    [
        (chunk("1"), "the stream ended before"),
        (chunk("1") + b'data: {"error": {"message": "the replica is gone"}}\n\n', "the replica is gone"),
    ],
)
async def test_interrupted_response_is_a_failure(sent, detail):
    answer = await answer_of(sending(sent))

    assert (answer.code, answer.message, answer.stream_timings) == (BROKEN, None, None)
    assert detail in answer.detail


async def test_refusals_and_non_streams_are_reported():
    answer = await answer_of(sending(b'{"error": {"message": "too many"}}'), status=429)
    assert (answer.code, answer.detail) == ("429", "too many")
    assert (await answer_of(sending(b"data: [1]\n\n"))).code == "ProtocolError"
    async with ChatClient("127.0.0.1:1", "lmm", OPEN) as client:
        assert (await client.send(b"{}")).code == "ConnectionRefused"


async def test_chat_request_matches_openai_clients(tmp_path):
    (tmp_path / "key").write_text("a-key\n")
    access = Access(api_key_file=tmp_path / "key")
    async with streaming(ANSWER) as (address, asked), ChatClient(address, "lmm", access) as client:
        await client.send(client.encode(a_chat(b"first", b"second"), ("text",), {}), "7-1")
    body, headers = asked[0]
    assert (body["model"], body["stream"]) == ("lmm", True)
    *images, text = body["messages"][0]["content"]
    shown = [base64.b64decode(part["image_url"]["url"].partition(",")[2]) for part in images]
    assert shown == [b"first", b"second"]
    assert text == {"type": "text", "text": "What is 7 plus 5?"}
    assert (headers["x-request-id"], headers["x-api-key"]) == ("7-1", "a-key")


@pytest.mark.parametrize(
    ("inputs", "parameters"), [((Tensor.of("x", np.zeros(1)),), {}), (a_chat(), {"timeout": 1}), ((), {})]
)
def test_payload_without_a_chat_is_rejected_by_name(inputs, parameters):
    with pytest.raises(LoadError, match=r"--protocol chat sends only `messages`, `images` and `options`"):
        ChatClient("127.0.0.1:1", "lmm", OPEN).encode(inputs, (), parameters)


@pytest.mark.parametrize("said", [b"What is 7 plus 5?", b'[{"role": "user"}]', b"7"])
def test_invalid_messages_are_rejected(said):
    with pytest.raises(LoadError, match=r"is not a JSON list of OpenAI messages"):
        ChatClient("127.0.0.1:1", "lmm", OPEN).encode((Tensor("messages", "BYTES", strings(said)),), (), {})


def test_options_are_fields_of_the_request():
    client, options = ChatClient("127.0.0.1:1", "lmm", OPEN), b'{"max_tokens": 5, "stream": false, "model": "other"}'
    sent = json.loads(client.encode((*a_chat(), Tensor("options", "BYTES", strings(options))), (), {}))

    assert (sent["max_tokens"], sent["stream"], sent["model"]) == (5, True, "lmm")


@pytest.mark.parametrize("options", [b"max_tokens=5", b"[5]", b'"5"'])
def test_invalid_options_are_rejected(options):
    with pytest.raises(LoadError, match=r"is not a JSON object"):
        ChatClient("127.0.0.1:1", "lmm", OPEN).encode((*a_chat(), Tensor("options", "BYTES", strings(options))), (), {})


class Chats:
    def payload(self, _):
        return Payload(a_chat(), truth=b"12.")

    def score(self, truth, outputs):
        return Score(int(outputs["text"][0] == truth), 1)


async def a_load(address, protocol):
    options = AttackOptions(protocol=protocol, duration_seconds=1.0, seed=1)
    return await attack_async(a_pipeline(), address, LoadSpec.parse("constant:20"), options, source=Chats())


async def test_chat_load_reports_token_times(tmp_path):
    async def events(send):
        for word in WORDS:
            await send(chunk(word))
        await send(chunk(finish="stop") + DONE)

    async with streaming(events) as (address, asked):
        results = await a_load(address, "chat")
    summary = results.summary()
    assert summary["received"] == len(asked) == results.count(RequestOutcome.OK) > 0
    assert summary["measured_accuracy"] == 1.0
    records = results.answered
    assert (records["first_token_seconds"] >= records["sent"] - records["scheduled"]).all()
    assert (records["first_token_seconds"] <= records["latency_seconds"]).all()
    for column in ("first_token_seconds", "between_tokens_seconds"):
        assert 0 < summary[f"{column}_p50"] <= summary[f"{column}_p99"] < 30
    results.save(tmp_path)
    assert Results.load(tmp_path).summary() == json.loads((tmp_path / "load.json").read_text())["summary"]


async def test_multimodal_load_sends_chats_with_images_when_due():
    pipeline = a_pipeline("lmm-digits")
    load = LoadSpec.parse("multimodal:rps=30,seed=3")
    async with streaming(ANSWER) as (address, asked):
        options = AttackOptions(protocol="chat", duration_seconds=1.0, seed=1)
        results = await attack_async(pipeline, address, load, options)
    assert load.traffic is not None
    due = [one for one in draw(load.traffic.during(1.0), seed=1) if one.arrival_seconds < 1.0]

    assert results.records["scheduled"].tolist() == [one.arrival_seconds for one in due]
    assert results.records["images"].tolist() == [one.images for one in due]
    image_counts = [sum(part["type"] == "image_url" for part in body["messages"][0]["content"]) for body, _ in asked]
    assert sorted(image_counts) == sorted(one.images for one in due)
    assert {*results.modalities()} == {"text", "image"}


async def test_load_without_streaming_has_no_token_times(tmp_path):
    async def nothing(send):
        await send(b"")

    async with streaming(nothing) as (address, _):
        results = await a_load(address, "REST")
    assert not [name for name in results.summary() if "token" in name]
    results.save(tmp_path)
    assert Results.load(tmp_path).records.dtype.names == results.records.dtype.names
