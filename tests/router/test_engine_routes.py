"""Routes beside chats through the router to a third-party engine."""

import json
import tracemalloc
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.router.chats import ChatReplica, a_chat, a_chat_pipeline, data_url
from tests.router.engines import MODEL, Engine, an_engine_pipeline
from tests.router.fakes import Rig, a_rig
from tests.router.test_chats import CHAT, ask
from trimtab_protocol.chat.engine_responses import WholeParser
from trimtab_protocol.chat.openai_backend import prefix_salt

USAGE = {"prompt_tokens": 5, "total_tokens": 8, "completion_tokens": 3}


def _completions(*texts: str) -> tuple[str, ...]:
    base: dict[str, Any] = {"id": "cmpl-1", "object": "text_completion", "model": MODEL}
    choices = [{"index": 0, "text": text, "logprobs": None, "finish_reason": None} for text in texts]
    chunks: list[dict[str, Any]] = [base | {"choices": [choice]} for choice in choices]
    chunks[-1]["choices"][0]["finish_reason"] = "stop"
    return (*map(json.dumps, [*chunks, base | {"choices": [], "usage": USAGE}]), "[DONE]")


def _response(status: str, **fields: Any) -> dict[str, Any]:
    return {"id": "resp_1", "object": "response", "model": MODEL, "status": status, "output": []} | fields


TEXT = {"type": "response.output_text.delta", "delta": "hello"}
DONE: dict[str, Any] = {
    "type": "response.completed",
    "response": _response("completed", usage={"input_tokens": 4, "output_tokens": 1}, output=[{"text": "hello"}]),
}
RESPONSE = tuple(map(json.dumps, [{"type": "response.created", "response": _response("in_progress")}, TEXT, DONE]))
EMBEDDINGS = {"object": "list", "model": MODEL, "data": [{"index": 0, "embedding": [0.5, -1.0]}], "usage": USAGE}


@asynccontextmanager
async def engine(routes: Mapping[str, Any], batch_size: int = 1) -> AsyncIterator[tuple[Engine, Rig]]:
    made = Engine(kind="vllm", routes={f"/{path}": reply for path, reply in routes.items()})
    async with a_rig(an_engine_pipeline(), {"text": [made]}, batchSize=batch_size) as rig:
        yield made, rig


async def post(rig: Rig, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    async with rig.session.post(rig.url + path, json={"model": "sample"} | body, headers=headers) as answer:
        text = await answer.text()
        return answer.status, json.loads(text) if answer.content_type == "application/json" else text


async def test_embeddings_are_forwarded_as_written():
    async with engine({"v1/embeddings": EMBEDDINGS}) as (theirs, rig):
        sent = {"input": ["https://a", [1, 2]], "dimensions": 2, "anything": {"else": None}}
        status, body = await post(rig, "/v1/embeddings", sent)

        assert (status, body) == (200, EMBEDDINGS | {"model": "sample"})
        assert theirs.asked == [{"model": MODEL, **sent}]
        assert rig.value("trimtab_tokens_total", direction="in") == 5
        assert await rig.outcomes() == {"ok": 1}


@pytest.mark.parametrize(
    ("path", "reply"),
    [
        (
            "v1/rerank",
            {"model": MODEL, "results": [{"index": 1, "relevance_score": 0.5}], "usage": {"total_tokens": 3}},
        ),
        ("v1/score", {"model": MODEL, "data": [{"score": 0.1}], "usage": USAGE}),
        ("tokenize", {"count": 3, "max_model_len": 64, "tokens": [1, 2, 3]}),
        ("detokenize", {"prompt": 'a "model": "b"'}),
    ],
)
async def test_whole_responses_return_unchanged(path: str, reply: dict[str, Any]):
    async with engine({path: reply}) as (_, rig):
        status, body = await post(rig, f"/{path}", {"query": "a"})

        assert (status, body) == (200, reply | ({"model": "sample"} if "model" in reply else {}))


async def test_whole_completion_is_merged_from_its_stream():
    async with engine({"v1/completions": _completions("one ", "two")}) as (theirs, rig):
        status, body = await post(rig, "/v1/completions", {"prompt": ["a"], "max_tokens": 4, "cache_salt": "x"})

        assert status == 200, body
        choice = {"index": 0, "text": "one two", "logprobs": None, "finish_reason": "stop"}
        assert (body["choices"], body["usage"], body["model"]) == ([choice], USAGE, "sample")
        (asked,) = theirs.asked
        assert (asked["stream"], asked["stream_options"]) == (True, {"include_usage": True})
        assert asked["cache_salt"] == prefix_salt("127.0.0.1", "x")


@pytest.mark.parametrize("usage", [False, True])
async def test_completion_is_streamed_with_usage_on_request(usage):
    async with engine({"v1/completions": _completions("one ", "two")}) as (_, rig):
        body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": usage}}
        status, text = await post(rig, "/v1/completions", body)

        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert (status, text.endswith("data: [DONE]\n\n"), len(events)) == (200, True, 2 + usage)
        assert {event["model"] for event in events} == {"sample"}


async def test_response_is_its_last_event_or_a_stream():
    async with engine({"v1/responses": RESPONSE}) as (theirs, rig):
        status, body = await post(rig, "/v1/responses", {"input": "hi"})
        assert (status, body) == (200, DONE["response"] | {"model": "sample"})
        assert theirs.asked[0]["store"] is False

        status, text = await post(rig, "/v1/responses", {"input": "hi", "stream": True})
        kinds = [line[7:] for line in text.splitlines() if line.startswith("event: ")]
        assert kinds == ["response.created", "response.output_text.delta", "response.completed"]
        assert MODEL not in text


async def test_failed_response_is_retried_before_its_output():
    failed = {
        "type": "response.failed",
        "response": _response("failed", error={"code": "server_error", "message": "x"}),
    }
    async with engine({"v1/responses": (RESPONSE[0], json.dumps(failed))}) as (theirs, rig):
        status, body = await post(rig, "/v1/responses", {"input": "hi", "stream": True})

        assert (status, body["error"]["code"], len(theirs.asked)) == (500, "ModelServerError", 3)


async def test_transcription_form_is_written_anew():
    async with engine({"v1/audio/transcriptions": "hello"}) as (theirs, rig):
        form = aiohttp.FormData({"model": "sample", "response_format": "text"})
        form.add_field("file", b"RIFF\r\n--x" + b"\0" * 70_000, filename="a.wav", content_type="audio/wav")
        async with rig.session.post(rig.url + "/v1/audio/transcriptions", data=form) as answer:
            assert (answer.status, await answer.text(), answer.content_type) == (200, "hello", "text/plain")

        (sent,) = theirs.forms
        assert f'name="model"\r\n\r\n{MODEL}\r\n'.encode() in sent
        assert (sent.count(b"sample"), b'filename="a.wav"' in sent, b"RIFF\r\n--x\0" in sent) == (0, True, True)


@pytest.mark.parametrize("body", [b"", b"{}", b"--a\r\n", b"--a\r\nx"])
async def test_broken_form_is_refused(body: bytes):
    headers = {"Content-Type": "multipart/form-data; boundary=a"}
    async with engine({"v1/audio/transcriptions": "hello"}) as (theirs, rig):
        async with rig.session.post(rig.url + "/v1/audio/transcriptions", data=body, headers=headers) as answer:
            assert answer.status == 400, await answer.text()
        assert theirs.forms == []


async def test_route_that_the_engine_lacks_is_named():
    async with engine({}) as (_, rig):
        status, body = await post(rig, "/v1/rerank", {"query": "a"})

        assert (status, body["error"]["code"]) == (404, "RouteNotServed")
        assert "/v1/rerank" in body["error"]["message"]
        assert await rig.outcomes() == {"refused": 1}


async def test_own_engine_refuses_other_routes():
    async with a_rig(a_chat_pipeline(), {"text": [ChatReplica()]}) as rig:
        status, body = await post(rig, "/v1/completions", {"prompt": "a"})

        assert (status, body["error"]["code"], CHAT in body["error"]["message"]) == (404, "RouteNotServed", True)


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
FIELDS: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    "logit_bias": {"5": 1},
    "top_logprobs": 2,
    "guided_json": SCHEMA,
    "guided_regex": "a+",
    "structured_outputs": {"json": SCHEMA},
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "high",
    "messages": [
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": "a", "content": "one"},
    ],
}
PATHS: dict[str, Any] = {
    "/v1/completions": _completions("one"),
    "/v1/embeddings": EMBEDDINGS,
    "/v1/responses": RESPONSE,
    "/v1/rerank": {"results": []},
    "/v1/score": {"data": []},
    "/tokenize": {"count": 3},
    "/detokenize": {"prompt": "a"},
}
ROWS = [
    *((CHAT, a_chat("one") | {name: value}, name) for name, value in FIELDS.items()),
    *((path, {"input": "a", "prompt": "a", "query": "a"}, path) for path in PATHS),
    (CHAT, a_chat("one", dry_run=True), ""),
]


@pytest.mark.parametrize(("path", "body", "name"), ROWS, ids=[name or "dry_run" for *_, name in ROWS])
async def test_what_an_engine_serves_ours_refuses_by_name(path: str, body: dict[str, Any], name: str):
    theirs, ours = (
        Engine(kind="vllm", routes=PATHS),
        ChatReplica(counts={"prompt_tokens": 3, "text_tokens": 3, "image_tokens": []}),
    )
    async with a_rig(an_engine_pipeline(), {"text": [theirs]}) as rig:
        status, reply = await post(rig, path, body)
    assert status == 200, reply
    assert path != CHAT or not name or theirs.asked[0][name] == body[name]
    async with a_rig(a_chat_pipeline(), {"text": [ours]}) as rig:
        status, reply = await post(rig, path, body)
    assert (
        (status, name in reply["error"]["message"]) == (404 if path != CHAT else 400, True) if name else status == 200
    )
    assert ours.written == []


async def test_unknown_path_names_the_routes_served():
    async with engine({}) as (_, rig):
        status, body = await post(rig, "/v1/images", {})
        assert (status, "/v1/rerank" in body["error"]["message"]) == (404, True)


def test_hostile_response_takes_memory_of_its_size():
    body = b'{"usage": {"' + b"a" * 2**20
    parser = WholeParser()
    assert not list(parser.feed(body))
    tracemalloc.start()
    try:
        parser.end()
        assert tracemalloc.get_traced_memory()[1] < 8 * len(body)
    finally:
        tracemalloc.stop()


LINK = {"type": "input_image", "image_url": "http://10.0.0.1/a.png"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("v1/completions", {"prompt": "a", "n": 9}, "n"),
        ("v1/completions", {"prompt": ["a"] * 65}, "prompt"),
        ("v1/completions", {"prompt": "a", "priority": -1}, "priority"),
        ("v1/completions", {"prompt": "a", "stream": "yes"}, "stream"),
        ("v1/responses", {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ("v1/responses", {"input": [{"role": "user", "content": [LINK]}]}, "input.content.image_url"),
        ("v1/responses", {"tools": [{"type": "mcp", "server_url": "http://10.0.0.1"}]}, "tools.server_url"),
        ("v1/embeddings", {"input": [{"image": "/etc/passwd"}]}, "input.image"),
    ],
)
async def test_field_that_would_harm_others_is_refused(path: str, body: dict[str, Any], param: str):
    async with engine({path: EMBEDDINGS}) as (theirs, rig):
        status, reply = await post(rig, f"/{path}", body)

        assert (status, reply["error"]["param"], theirs.asked) == (400, param, [])


async def test_data_urls_and_schemas_reach_the_engine():
    image = {"type": "input_image", "image_url": data_url(b"QUJD" * 200)}
    schema = {"parameters": {"url": {"$schema": "https://json-schema.org/x"}}}
    async with engine({"v1/responses": RESPONSE}) as (theirs, rig):
        sent = {"input": [{"role": "user", "content": [image]}], "tools": [{"type": "function", **schema}]}
        assert (await post(rig, "/v1/responses", sent))[0] == 200

        assert {name: theirs.asked[0][name] for name in sent} == sent


async def test_busy_engine_gets_the_request_again():
    async with engine({"v1/embeddings": EMBEDDINGS}) as (theirs, rig):
        theirs.answers = [(503, {}), (429, {})]
        assert (await post(rig, "/v1/embeddings", {"input": "a"}))[0] == 200
        assert len(theirs.asked) == 3


async def test_model_of_another_pipeline_is_unknown():
    async with engine({"v1/embeddings": EMBEDDINGS}) as (_, rig):
        status, body = await post(rig, "/v1/embeddings", {"model": "other", "input": "a"})
        assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_models_tell_the_length_of_prompts():
    theirs = Engine(max_model_len=100)
    async with a_rig(an_engine_pipeline(), {"text": [theirs]}) as rig:
        assert (await ask(rig, a_chat("one")))[0] == 200
        async with rig.session.get(rig.url + "/v1/models") as answer:
            assert (await answer.json())["data"][0]["max_model_len"] == 100
