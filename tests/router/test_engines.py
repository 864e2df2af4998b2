"""Chats through the router to an engine with an OpenAI API."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from tests.router.chats import ChatReplica, a_chat, a_chat_pipeline, a_png, a_writer, data_url, events, words_of
from tests.router.engines import MODEL, Engine, a_served, an_engine_pipeline
from tests.router.fakes import Rig, a_rig
from tests.router.test_chats import CHAT, ask, tell
from trimtab_protocol import InferRequest, Tensor
from trimtab_protocol.chat.internal_wire import MAX_PROMPT_TOKENS


@asynccontextmanager
async def engine(batch_size: int = 1, **changes: Any) -> AsyncIterator[tuple[Engine, Rig]]:
    made = Engine(**changes)
    async with a_rig(an_engine_pipeline(), {"text": [made]}, batchSize=batch_size) as rig:
        yield made, rig


async def test_complete_response_and_its_engine_request():
    async with engine(details={"cached_tokens": 4, "image_tokens": 8}) as (theirs, rig):
        chat = a_chat("one two", a_png(), max_tokens=1, seed=5, temperature=0.5, top_k=0, stop="x")
        status, body, _ = await ask(rig, chat, **{"x-request-id": "abc"})

        assert status == 200, body
        assert body["choices"][0]["message"]["content"] == "one"
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"] == {
            "prompt_tokens": 12,
            "completion_tokens": 1,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 4, "image_tokens": 8, "text_tokens": 4},
        }
        image = {"type": "image_url", "image_url": {"url": data_url(a_png())}}
        assert theirs.asked == [
            {
                "model": MODEL,
                "cache_salt": "127.0.0.1",
                "messages": [{"role": "user", "content": [{"type": "text", "text": "one two"}, image]}],
                "max_tokens": 1,
                "temperature": 0.5,
                "stop": ["x"],
                "seed": 5,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ]
        assert theirs.paths == {"/health", "/v1/models", CHAT}
        assert await rig.outcomes() == {"ok": 1}


async def test_prefixes_are_salted_by_client_without_options():
    theirs, messages = Engine(), {"name": "messages", "from": "request.inputs.messages"}
    async with a_rig(a_chat_pipeline([a_writer(messages, variants=[a_served()])]), {"text": [theirs]}) as rig:
        for client in ("one", "other"):
            assert (await ask(rig, a_chat(), **{"x-trimtab-client": client}))[0] == 200

    assert [asked["cache_salt"] for asked in theirs.asked] == ["one", "other"]


async def test_engine_chunks_are_streamed():
    async with engine(stepped=True) as (theirs, rig):
        theirs.steps.release()
        asked = a_chat("one two", stream=True, logprobs=True, stream_options={"include_usage": True})
        async with rig.session.post(rig.url + CHAT, json=asked) as answer:
            while b'"one "' not in await answer.content.readuntil(b"\n\n"):
                pass
            assert theirs.running == 1
            theirs.steps.release()
            rest = events(await answer.read())

        assert words_of(rest) == "two"
        assert rest[0]["choices"][0]["logprobs"]["content"][0]["logprob"] == -0.5
        assert (rest[-1], rest[-2]["usage"]["completion_tokens"]) == ("[DONE]", 2)
        assert rig.value("trimtab_tokens_total", direction="in") == 12


@pytest.mark.parametrize(("status", "ours"), [(400, 400), (413, 413), (422, 400)])
async def test_engine_client_error_reaches_the_client(status: int, ours: int):
    refusal = {"error": {"message": "the prompt has 9000 tokens; at most 8192 fit", "type": "BadRequestError"}}
    async with engine(answers=[(status, refusal)]) as (theirs, rig):
        got, body, _ = await ask(rig, a_chat())

        assert (got, "at most 8192 fit" in body["error"]["message"], len(theirs.asked)) == (ours, True, 1)
        assert await rig.outcomes() == {"refused": 1}


TOO_LONG = {"message": "the prompt has 9000 tokens; at most 8192 fit", "type": "BadRequestError"}


@pytest.mark.parametrize("code", [400, "context_length_exceeded", None])
@pytest.mark.parametrize("stream", [False, True])
async def test_overlong_prompt_is_rejected_within_a_stream(code, stream):
    async with engine(last=(json.dumps({"error": TOO_LONG | {"code": code}}),)) as (_, rig):
        status, body, _ = await ask(rig, a_chat("", stream=stream))

        assert (status, "at most 8192 fit" in body["error"]["message"]) == (400, True)


@pytest.mark.parametrize("external", [False, True])
async def test_overlong_prompt_is_never_dropped_as_late(external):
    slo = {"latency": "60s", "timeToFirstToken": "1s"}
    own, theirs = ChatReplica(facts=lambda: {MAX_PROMPT_TOKENS: 100}), Engine(max_model_len=100)
    pipeline = an_engine_pipeline(slo=slo) if external else a_chat_pipeline(slo=slo)
    prefill: dict[str, Any] = {"promptTokens": 5.0, "prefillSeconds": {5: 0.01, 1005: 1.0}, "serviceSeconds": {1: 0.01}}
    async with a_rig(pipeline, {"text": [theirs if external else own]}, **prefill) as rig:
        assert (await ask(rig, a_chat("one two")))[0] == 200
        own.refusing = (400, "too long")
        theirs.answers = [(400, {"error": TOO_LONG})]
        assert (await ask(rig, a_chat("x" * 20_000)))[0] == 400


@pytest.mark.parametrize("status", [429, 503])
async def test_busy_engine_is_retried(status: int):
    async with engine(answers=[(status, {"error": {"message": "no room"}})] * 2) as (theirs, rig):
        assert words_of(await tell(rig, a_chat("one two"))) == "one two"

        assert len(theirs.asked) == 3
        assert rig.value("trimtab_retries_total", reason="ReplicaNotReady") == 2
        assert await rig.outcomes() == {"ok": 1}


async def test_engine_without_the_model_fails_at_once():
    async with engine(answers=[(404, {"object": "error", "message": "no such model", "code": 404})] * 9) as (_, rig):
        status, body, _ = await ask(rig, a_chat())

        assert (status, body["error"]["code"]) == (500, "ModelServerError")


END = '{"choices": [{"index": 0, "delta": {}, "finish_reason": "%s"}]}'


@pytest.mark.parametrize(
    "last",
    [(END % "stop", "[DONE]"), ("[DONE]",), (END % "abort", "[DONE]"), ("{}", "[DONE]"), ("no JSON",)],
    ids=["no usage", "no reason", "given up", "no chunk", "no JSON"],
)
async def test_an_answer_that_is_none_is_never_given_for_one(last: tuple[str, ...]):
    async with engine(last=last) as (_, rig):
        status, body, _ = await ask(rig, a_chat())

        assert (status, body["error"]["type"]) == (500, "server_error")


async def test_engine_chats_cannot_be_counted():
    async with engine() as (theirs, rig):
        status, body, headers = await ask(rig, a_chat("hi", dry_run=True))

        assert (status, body["error"]["code"], headers["x-should-retry"]) == (501, "CountsNothing", "false")
        assert theirs.asked == []


async def test_engine_gets_no_request_before_it_is_ready():
    theirs = Engine(ready=False)
    async with a_rig(an_engine_pipeline(), {"text": [theirs]}, ready=False) as rig:
        await rig.until(lambda: theirs.probes > 2)
        assert not rig.router.ready
        theirs.ready = True
        await rig.until_ready()


async def test_tensors_that_are_no_chat_never_reach_the_engine():
    said = b'[{"role": "user", "content": [{"type": "image"}]}]'
    async with engine() as (theirs, rig):
        for messages in (b"{", b"{}", b"[1]", said):
            tensor = Tensor("messages", "BYTES", np.array([messages], dtype=object))
            status, body, _ = await rig.rest(InferRequest("sample", (tensor,)))
            assert status == 400, body
        assert theirs.asked == []
