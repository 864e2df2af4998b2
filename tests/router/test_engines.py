"""Chats through the router to an engine with an OpenAI API."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from tests.builders import a_variant
from tests.router.chats import ChatReplica, a_chat, a_chat_pipeline, a_png, a_writer, data_url, events, words_of
from tests.router.engines import MODEL, Engine, a_served, an_engine_pipeline
from tests.router.fakes import Rig, a_rig
from tests.router.test_chats import CHAT, ask, tell
from trimtab_pipelines.engines import ENGINES
from trimtab_protocol import InferRequest, Tensor
from trimtab_protocol.chat.internal_wire import MAX_PROMPT_TOKENS
from trimtab_protocol.chat.openai_backend import prefix_salt
from trimtab_router.limits import Limits
from trimtab_router.transport.engine_load import parse_engine_load


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
                "cache_salt": prefix_salt("127.0.0.1", ""),
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


CLIENTS = ("one", "https://issuer.example/users@a")
"""As Envoy names clients: by key, by the issuer and subject of a token."""


async def test_prefixes_are_salted_by_client_without_options():
    theirs, messages = Engine(), {"name": "messages", "from": "request.inputs.messages"}
    async with a_rig(a_chat_pipeline([a_writer(messages, variants=[a_served()])]), {"text": [theirs]}) as rig:
        for client in CLIENTS:
            assert (await ask(rig, a_chat(), **{"x-trimtab-client": client}))[0] == 200

    assert [asked["cache_salt"] for asked in theirs.asked] == [prefix_salt(client, "") for client in CLIENTS]


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


async def test_tokens_of_text_are_counted_by_an_engine_that_can():
    counts = {"count": 7, "max_model_len": 100, "tokens": [1] * 40_000}
    theirs = Engine(kind="vllm", routes={"/tokenize": counts})
    async with a_rig(an_engine_pipeline(), {"text": [theirs]}) as rig:
        status, body, _ = await ask(rig, a_chat("hi", dry_run=True, tools=[], max_tokens=3))
        assert (status, body["usage"]["prompt_tokens"]) == (200, 7)
        assert theirs.asked == [{"model": MODEL, "tools": [], "messages": [{"role": "user", "content": "hi"}]}]


async def test_tokens_of_images_are_counted_by_an_engine_that_can():
    rendered = {"request_id": "1", "token_ids": [7] * 40_000, "features": {"kwargs_data": {"image": ["x" * 2**23]}}}
    theirs = Engine(kind="vllm", routes={"/v1/chat/completions/render": rendered})
    async with a_rig(an_engine_pipeline(), {"text": [theirs]}) as rig:
        status, body, _ = await ask(rig, a_chat("hi", a_png(), dry_run=True))
        assert (status, body["usage"]["prompt_tokens"]) == (200, 40_000)
        (asked,) = theirs.asked
        assert [part["type"] for part in asked["messages"][0]["content"]] == ["text", "image_url"]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((200, {"error": "too old"}), (503, "NotCounted")),
        ((403, {"error": {"message": "Restart with --enable-scale-out", "code": 403}}), (501, "CountsNothing")),
        ((404, {"detail": "Not Found"}), (501, "CountsNothing")),
    ],
)
async def test_an_engine_that_does_not_count_images_says_why(answer: tuple[int, Any], expected: tuple[int, str]):
    theirs = Engine(kind="vllm", routes={"/v1/chat/completions/render": {}}, answers=[answer])
    async with a_rig(an_engine_pipeline(), {"text": [theirs]}) as rig:
        status, body, _ = await ask(rig, a_chat("hi", a_png(), dry_run=True))

    assert (status, body["error"]["code"]) == expected
    assert answer[0] != 403 or "--enable-scale-out" in body["error"]["message"]


async def test_tokens_of_images_are_not_counted_by_other_engines():
    theirs = Engine(kind="sglang")
    async with a_rig(an_engine_pipeline(), {"text": [theirs]}) as rig:
        status, body, _ = await ask(rig, a_chat("hi", a_png(), dry_run=True))
        assert (status, body["error"]["code"], theirs.asked) == (501, "CountsNothing", [])


def _metrics(waiting: float, running: float = 0.0) -> str:
    labels = f'{{engine="0",model_name="{MODEL}"}}'
    return (
        "# HELP vllm:num_requests_waiting x\n"
        f"vllm:num_requests_waiting{labels} {waiting}\nvllm:num_requests_running{labels} {running}\n"
        f"vllm:kv_cache_usage_perc{labels} 0.5\nvllm:num_preemptions_total{labels} 2.0\n"
        f"vllm:num_requests_waiting_by_reason{labels} 99.0\n"
    )


@pytest.mark.parametrize("busy", [_metrics(1.0), _metrics(0.0, 3.0)], ids=["waiting", "running"])
async def test_chats_go_to_the_engine_with_less_load(busy: str):
    engines = [Engine(kind="vllm", name=f"text-{n}", metrics=m) for n, m in enumerate((busy, _metrics(0.0)))]
    async with a_rig(an_engine_pipeline(), {"text": engines}, batchSize=4) as rig:
        await rig.until(lambda: all(each.scrapes > 1 for each in engines))
        for _ in range(4):
            assert (await ask(rig, a_chat("one")))[0] == 200

        assert [len(each.asked) for each in engines] == [0, 4]
        assert rig.value("trimtab_engine_requests", stage="text", state="running") == busy.count("3.0") * 3
        assert rig.value("trimtab_engine_kv_cache_usage_ratio", stage="text") == 0.5
        assert rig.value("trimtab_engine_preemptions", stage="text") == 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "vllm:num_requests_running 1\n",
        "\0" * 99,
        *(f"vllm:num_requests_waiting {n}\n" for n in ("NaN", "1.2.3", "9e999")),
    ],
)
def test_unreadable_load_is_no_load(text: str):
    metrics = ENGINES["vllm"].load
    assert metrics is not None
    assert parse_engine_load(text.encode(), metrics) is None


async def test_first_chat_of_an_engine_has_time_to_compile():
    theirs, limits = Engine(kind="vllm", stepped=True), Limits(hang_seconds=0.2)
    async with a_rig(an_engine_pipeline(), {"text": [theirs]}, limits=limits) as rig:
        asked = asyncio.create_task(ask(rig, a_chat("one")))
        await rig.until(lambda: theirs.running == 1)
        since = time.monotonic()
        await rig.until(lambda: time.monotonic() - since > 0.6)
        theirs.steps.release()

        assert (await asked)[0] == 200
        assert len(theirs.asked) == 1


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


CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
VIDEO = "data:video/mp4;base64," + "QUJD" * 100
FORWARDED: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "parallel_tool_calls": False,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    "logit_bias": {"5": -100},
    "top_logprobs": 2,
    "presence_penalty": 0.5,
    "guided_json": {"type": "object"},
    "reasoning_effort": "high",
    "chat_template_kwargs": {"enable_thinking": False},
    "user": "anna",
}


async def test_all_that_a_caller_sends_reaches_the_engine():
    image = {"type": "image_url", "image_url": {"url": data_url(a_png()), "detail": "low"}, "uuid": "a"}
    video = {"type": "video_url", "video_url": {"url": VIDEO}}
    audio = {"type": "input_audio", "input_audio": {"data": "QUJD" * 200, "format": "wav"}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "look"}, video, image, audio], "name": "anna"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    async with engine() as (theirs, rig):
        chat = a_chat(logprobs=True, stream_options={"continuous_usage_stats": True}, **FORWARDED)
        status, body, _ = await ask(rig, chat | {"messages": messages})

        assert status == 200, body
        (asked,) = theirs.asked
        assert asked["messages"] == messages
        assert asked["stream_options"] == {"continuous_usage_stats": True, "include_usage": True}
        assert {name: asked[name] for name in FORWARDED} == FORWARDED


async def test_audio_counts_apart_from_json():
    theirs, limits = Engine(), Limits(max_json_bytes=2**14)
    audio = {"type": "input_audio", "input_audio": {"data": "QUJD" * 2**14, "format": "wav"}}
    async with a_rig(an_engine_pipeline(), {"text": [theirs]}, limits=limits) as rig:
        messages = [{"role": "user", "content": [audio, {"type": "text", "text": "say it"}]}]
        status, body, _ = await ask(rig, a_chat() | {"messages": messages})

        assert status == 200, body
        assert theirs.asked[0]["messages"] == messages


@pytest.mark.parametrize(("fields", "own"), [({"user": "anna"}, True), ({"tools": [{"type": "x"}]}, False)])
async def test_chat_that_both_engines_can_serve_is_written_for_both(fields: dict[str, Any], own):
    theirs = Engine()
    pipeline = a_chat_pipeline([a_writer(variants=[a_served(), a_variant("own")])])
    async with a_rig(pipeline, {"text": [theirs]}) as rig:
        assert (await ask(rig, a_chat("one", **fields)))[0] == 200
        assert ("tools" in theirs.asked[0], "user" in theirs.asked[0]) == (not own, False)


def _scripted(*choices: dict[str, Any], **fields: Any) -> tuple[str, ...]:
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "completion_tokens_details": {"reasoning_tokens": 1}}
    chunks = [{"choices": [{"index": 0} | choice], **fields} for choice in choices]
    return (*map(json.dumps, chunks), json.dumps({"choices": [], "usage": usage}), "[DONE]")


CALLING = _scripted(
    {"delta": {"role": "assistant", "content": None}},
    {"delta": {"reasoning_content": "rain"}},
    {"delta": {"reasoning_content": "y?"}},
    {"delta": {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather"}}]}},
    {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]}},
    {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '"Oslo"}'}}]}},
    {"delta": {"tool_calls": [{"index": 1, **CALL, "id": "call_2"}]}},
    {"delta": {}, "finish_reason": "tool_calls", "stop_reason": 7},
    service_tier="flex",
)


async def test_tool_calls_and_reasoning_are_in_a_whole_response():
    async with engine(last=CALLING) as (_, rig):
        status, body, _ = await ask(rig, a_chat(""))

        assert status == 200, body
        message = {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "rainy?"}
        called = {"tool_calls": [CALL, CALL | {"id": "call_2"}]}
        (choice,) = body["choices"]
        assert choice["message"] == message | called
        assert (choice["finish_reason"], choice["stop_reason"], body["service_tier"]) == ("tool_calls", 7, "flex")
        assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}


async def test_tool_calls_and_reasoning_are_streamed_unchanged():
    async with engine(last=CALLING) as (_, rig):
        sent = await tell(rig, a_chat("", n=2, stream_options={"include_usage": True}))

        theirs = [json.loads(chunk)["choices"][0] for chunk in CALLING[1:-2]]
        for row in (0, 1):
            ours = [c for each in sent[:-2] for c in each["choices"] if c["index"] == row][1:]
            assert [choice["delta"] for choice in ours] == [choice["delta"] for choice in theirs]
            assert (ours[-1]["finish_reason"], ours[-1]["stop_reason"]) == ("tool_calls", 7)
        assert sent[-2]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
        assert {(each["model"], each["id"][:9]) for each in sent[:-1]} == {("sample", "chatcmpl-")}


async def test_stream_without_done_is_complete():
    async with engine(last=CALLING[:-1]) as (_, rig):
        assert (await ask(rig, a_chat("")))[0] == 200


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "video_url", "video_url": {"url": "http://10.0.0.1/a.mp4"}}, ".video_url.url"),
        ({"type": "video_url", "video_url": {"url": "/etc/passwd"}}, ".video_url.url"),
        ({"type": "video", "video": [" http://10.0.0.1/1.png"]}, ".video"),
        ({"type": "image_embeds", "image_embeds": "QUJD"}, ".type"),
    ],
)
async def test_an_engine_fetches_nothing_for_a_client(part: dict[str, Any], param: str):
    async with engine() as (theirs, rig):
        messages = [{"role": "user", "content": [part]}]
        status, body, _ = await ask(rig, a_chat() | {"messages": messages})

        assert (status, body["error"]["param"], theirs.asked) == (400, f"messages[0].content[0]{param}", [])


@pytest.mark.parametrize("kind", ["video_url", "image_url", "image"])
async def test_an_engine_fetches_nothing_for_tensors(kind: str):
    part = {"type": kind, kind if kind != "image" else "image_url": {"url": "http://10.0.0.1/a.mp4"}}
    messages = json.dumps([{"role": "user", "content": [part]}]).encode()
    async with engine() as (theirs, rig):
        tensor = Tensor("messages", "BYTES", np.array([messages], dtype=object))
        status, body, _ = await rig.rest(InferRequest("sample", (tensor,)))

        assert (status, "may not be fetched" in str(body), theirs.asked) == (400, True, [])


DEEP = '{"choices": [{"delta": {"x": ' + "[" * 900 + "]" * 900 + "}}]}"
LIES = '{"choices": [], "usage": {"prompt_tokens": -5, "completion_tokens": 1e30}}'


@pytest.mark.parametrize(
    "script",
    [
        (END % "stop", LIES, "[DONE]"),
        (DEEP, END % "stop", "[DONE]"),
        ('{"choices": [{"delta": []}]}', '{"choices": {"a": 1}}'),
        ('{"choices": [{"delta": {"tool_calls": 7}}]}', "[DONE]"),
        ('{"choices": [{"delta": {"content": "x"}}]}',) * 2000,
    ],
    ids=["usage", "depth", "types", "no end", "flood"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_hostile_engine_harms_no_other_caller(script: tuple[str, ...], stream):
    theirs, limits = Engine(last=script), Limits(max_response_bytes=2**16)
    async with a_rig(an_engine_pipeline(), {"text": [theirs]}, batchSize=4, limits=limits) as rig:
        async with rig.session.post(rig.url + CHAT, json=a_chat("", stream=stream)) as answer:
            text = await answer.text()
            assert '{"error":' in text.replace('{"error": ', '{"error":'), text

        assert await rig.outcomes() == {"failed": 1}
        theirs.last = None
        assert (await ask(rig, a_chat("one")))[0] == 200


@pytest.mark.parametrize(
    ("kind", "salted", "bound"),
    [("vllm", True, "max_tokens"), ("transformers", False, "max_tokens"), ("openai", False, "max_completion_tokens")],
)
async def test_engine_gets_only_fields_that_its_kind_knows(kind: str, salted, bound: str):
    theirs = Engine(kind=kind)
    async with a_rig(an_engine_pipeline(), {"text": [theirs]}) as rig:
        assert (await ask(rig, a_chat("one", max_tokens=4)))[0] == 200

        (asked,) = theirs.asked
        assert ("cache_salt" in asked, {"max_tokens", "max_completion_tokens"} & asked.keys()) == (salted, {bound})


async def test_stalled_response_harms_no_other_caller():
    theirs, limits = Engine(kind="vllm"), Limits(hang_seconds=0.3)
    async with a_rig(an_engine_pipeline(), {"text": [theirs]}, batchSize=4, limits=limits) as rig:
        assert (await ask(rig, a_chat("one")))[0] == 200
        theirs.stepped = True
        stalled = asyncio.create_task(ask(rig, a_chat("late")))
        await rig.until(lambda: theirs.running == 1)
        theirs.stepped = False
        assert (await ask(rig, a_chat("one")))[0] == 200

        assert (await stalled)[1]["choices"][0]["message"]["content"] == "late"  # by its second attempt
        assert [chat.ended for chat in theirs.written if chat.messages[-1]["content"] == "late"] == ["left", "whole"]


async def test_engine_may_be_silent_between_tokens():
    theirs, limits = Engine(kind="vllm"), Limits(hang_seconds=0.2)
    async with a_rig(an_engine_pipeline(), {"text": [theirs]}, limits=limits) as rig:
        assert (await ask(rig, a_chat("one")))[0] == 200
        theirs.pace_seconds = 0.6
        status, body, _ = await ask(rig, a_chat("one two three"))

        assert (status, body["choices"][0]["message"]["content"]) == (200, "one two three")


async def test_headers_of_a_client_stay_at_the_router():
    hostile = {"Authorization": "Bearer stolen", "Cookie": "a=b", "X-Forwarded-For": "10.0.0.1", "X-Session-Id": "a"}
    async with engine() as (theirs, rig):
        status, body, _ = await ask(rig, a_chat("one"), **hostile, **{"x-request-id": "a" * 4000})

        assert status in {200, 400}, body
        assert not theirs.headers.keys() & {name.lower() for name in hostile}
        assert len(theirs.headers.get("x-request-id", "")) <= 256


@pytest.mark.parametrize(("depth", "status"), [(50, 200), (5_000, 400)])
async def test_depth_of_a_schema_is_bounded(depth: int, status: int):
    schema = '{"items":' * depth + "{}" + "}" * depth
    chat = json.dumps(a_chat("one"))[:-1] + f', "guided_json": {schema}}}'
    async with engine() as (theirs, rig):
        headers = {"Content-Type": "application/json"}
        async with rig.session.post(rig.url + CHAT, data=chat, headers=headers) as answer:
            assert (answer.status, len(theirs.asked)) == (status, int(status == 200))
            assert "\n" not in (await answer.json()).get("error", {}).get("message", "")


async def test_huge_tools_are_refused_in_one_line():
    theirs, limits = Engine(), Limits(max_json_bytes=2**19)
    async with a_rig(an_engine_pipeline(), {"text": [theirs]}, limits=limits) as rig:
        for tools in ([{"type": "function"}] * 20_000, [{"a": "x" * 2**19}]):
            status, body, _ = await ask(rig, a_chat(tools=tools))
            assert (status, "\n" in body["error"]["message"]) == (400, False)
        assert theirs.asked == []
