"""OpenAI chat API: requests, responses, and the streamed chunks of compatible engines."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_protocol import ProtocolError
from trimtab_protocol.chat import openai_responses
from trimtab_protocol.chat.internal_wire import (
    Chunk,
    LastChunk,
    StreamFailure,
    Usage,
    bytes_tensor,
    chat_tensors,
    message_values,
    options_per_choice,
    parse_event,
)
from trimtab_protocol.chat.openai_backend import ChunkParser, completion_request, prefix_salt
from trimtab_protocol.chat.openai_requests import MAX_VALUES, parse_chat_request
from trimtab_protocol.chat.openai_responses import ChunkWriter, ResponseHeader
from trimtab_protocol.errors import InvalidChat
from trimtab_protocol.sse import SseParser, sse_event

HELLO = [{"role": "user", "content": "hello"}]


def parse(*, forwarded=False, **fields):
    body = json.dumps({"model": "m", "messages": HELLO} | fields).encode()
    return parse_chat_request(body, forwarded=forwarded)[0]


def one_message(*parts, role="user"):
    return [{"role": role, "content": list(parts)}]


def test_plain_chat_is_parsed():
    chat = parse()

    assert (chat.choices, chat.streams, chat.includes_usage, chat.image_urls) == (1, False, False, [])
    assert message_values(chat.messages) == [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert options_per_choice(chat, tenant="") == [{}]


def test_options_are_forwarded_with_a_seed_per_choice():
    chat = parse(
        max_tokens=5, max_completion_tokens=7, min_tokens=2, temperature=0.5, top_p=0.9, top_k=-1, stop="x",
        ignore_eos=True, logprobs=True, n=2, seed=3,
    )  # fmt: skip

    first, second = options_per_choice(chat, tenant="key:anna")
    assert first == {
        "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 0, "stop": ["x"],
        "ignore_eos": True, "logprobs": True, "tenant": "key:anna", "seed": 3,
    }  # fmt: skip
    assert second == first | {"seed": 4}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "u", "detail": "low"}},
        {"type": "image_url", "image_url": "u"},
        {"type": "input_image", "image_url": "u"},
        {"type": "image", "image": "u"},
    ],
)
def test_client_variants_of_image_parts_are_accepted(part):
    chat = parse(messages=one_message({"type": "input_text", "text": "what?"}, part))

    assert chat.image_urls == [("messages[0].content[1].image_url", "u")]
    assert message_values(chat.messages)[0]["content"] == [{"type": "text", "text": "what?"}, {"type": "image"}]


def test_roles_are_mapped_to_model_roles():
    messages = [{"role": "developer", "content": "be brief"}, *HELLO, {"role": "assistant", "content": None}]

    roles = [message["role"] for message in message_values(parse(messages=messages).messages)]
    assert roles == ["system", "user", "assistant"]


def test_fields_without_effect_are_accepted():
    parse(
        store=True, service_tier="auto", metadata={"a": "b"}, user="u", tools=None, tool_choice="auto",
        response_format={"type": "text"}, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, stream_options=None,
        messages=[*HELLO, {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": []}],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"messages": [HELLO[0] | {"name": "anna"}]}, "messages[0].name"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": one_message({"type": "input_audio"})}, "messages[0].content[0].type"),
        ({"messages": one_message({"type": "text"})}, "messages[0].content[0].text"),
        ({"messages": one_message({"type": "image_url"})}, "messages[0].content[0].image_url"),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls"),
        ({"n": 9}, "n"),
        ({"n": 0}, "n"),
        ({"temperature": 2.5}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop": list("abcde")}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stream": "perhaps"}, "stream"),
        ({"model": None}, "model"),
    ],
)
def test_invalid_field_is_named(fields, param):
    with pytest.raises(InvalidChat) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert param.rpartition("]")[2].lstrip(".") in str(caught.value)


@pytest.mark.parametrize(
    "field", ["priority", "request_id", "kv_transfer_params", "prompt_embeds", "mm_processor_kwargs", "media_io_kwargs"]
)
def test_fields_that_harm_other_clients_are_not_forwarded(field):
    with pytest.raises(InvalidChat, match=f"{field} is not supported; remove it: ") as caught:
        parse(forwarded=True, **{field: "x"})
    assert caught.value.param == field


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"model": "m"}', b"\xff\xfe{}", b"[" * 10**6])
def test_invalid_bodies_are_rejected(body):
    with pytest.raises(InvalidChat):
        parse_chat_request(body)


def test_many_small_values_are_rejected_before_parsing():
    text = '"1,2,' + "3," * MAX_VALUES + "\\\\"
    assert parse(messages=one_message({"type": "text", "text": text})).messages[0].content[0].text == text
    for values in ([1] * MAX_VALUES, [{"type": "text", "text": ""}] * MAX_VALUES):
        with pytest.raises(InvalidChat, match=f"more than {MAX_VALUES} values"):
            parse(metadata=values)


def test_rows_share_equal_values():
    chat = parse(n=3, messages=one_message({"type": "image_url", "image_url": "u"}))
    file = b"png"
    inputs = chat_tensors(message_values(chat.messages), [file], options_per_choice(chat, tenant="t"))

    assert {name: array.shape for name, array in inputs.items()} == {
        "messages": (3,),
        "options": (3,),
        "images": (3, 1),
    }
    assert all(row[0] is file for row in inputs["images"])


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (
            [one_message("")[0] | {"content": [{"type": "text", "text": ""}] * 41}] * 100,
            "has 4100 parts; send at most 4096",
        ),
        ([{"role": "user", "content": ""}] * 1025, "has 1025 messages; send at most 1024"),
        ([{"role": "user", "content": [7] * 4097}], "has 4097 parts; send at most 4096"),
    ],
)
def test_too_many_parts_are_rejected_before_parsing(messages, why):
    with pytest.raises(InvalidChat, match=why) as refused:
        parse(messages=messages)

    assert refused.value.param == "messages"
    assert len(parse(messages=one_message(*[{"type": "text", "text": "a"}] * 4096)).messages[0].content) == 4096


HEADING = ResponseHeader("chatcmpl-1", "m", 1700000000)
TOOK = Usage(prompt=31, completion=2, image=16, cached=5, text=15)


def events(raw):
    return [
        "[DONE]" if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))
        for line in raw.decode().split("\n\n")
        if line
    ]


def test_usage_counts_the_prompt_of_several_choices_once():
    reported = {"completion_tokens_details": {"reasoning_tokens": 1}, "cost": 0.5}
    last = LastChunk("", "stop", TOOK, {"usage": reported})
    assert openai_responses.usage([last, last]) == {
        "prompt_tokens": 31,
        "completion_tokens": 4,
        "total_tokens": 35,
        "completion_tokens_details": {"reasoning_tokens": 2},
        "cost": 0.5,
        "prompt_tokens_details": {"cached_tokens": 5, "image_tokens": 16, "text_tokens": 15},
    }


def test_completion_has_message_and_usage():
    logprobs = openai_responses.token_logprobs([Chunk("7", 1, -0.5)])
    last = LastChunk("7", "stop", TOOK, None, {"choices": [{"index": 0, "logprobs": logprobs}]})
    body = openai_responses.completion(HEADING, [last], "small")

    assert (body["object"], body["id"], body["created"]) == ("chat.completion", "chatcmpl-1", 1700000000)
    assert body["system_fingerprint"] == "small"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "7", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["content"][0] == {"token": "7", "logprob": -0.5, "bytes": [55], "top_logprobs": []}


@pytest.mark.parametrize("includes_usage", [False, True])
def test_stream_has_role_text_reason_and_done(includes_usage):
    chunks = ChunkWriter(HEADING, includes_usage=includes_usage, logprobs=False)
    last = LastChunk("!", "length", TOOK)
    raw = (
        chunks.first(0)
        + chunks.chunk(0, Chunk("7 é"))
        + chunks.chunk(0, Chunk('"\n\\'))
        + chunks.chunk(0, Chunk(""))
        + chunks.last(0, last)
    )
    sent = events(raw + chunks.end([last]))

    assert sent.pop() == "[DONE]"
    if includes_usage:
        took = sent.pop()
        assert (took["choices"], took["usage"]["prompt_tokens"]) == ([], 31)
        assert [each["usage"] for each in sent] == [None] * 5
    deltas = [each["choices"][0]["delta"] for each in sent]
    assert deltas == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "7 é"},
        {"content": '"\n\\'},
        {"content": "!"},
        {},
    ]
    assert [each["choices"][0]["finish_reason"] for each in sent] == [None, None, None, None, "length"]
    assert all("usage" in each for each in sent) is includes_usage
    assert {each["id"] for each in sent} == {"chatcmpl-1"}


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (429, "rate_limit_error"), (503, "server_error")]
)
def test_error_type_follows_the_status(status, kind):
    error = openai_responses.error_body(status, "no", reason="QueueFull", param="messages")["error"]
    assert error == {"message": "no", "type": kind, "param": "messages", "code": "QueueFull"}


def test_events_of_model_servers():
    usage = {f"{name}_tokens": n for n, name in enumerate(("prompt", "completion", "image", "cached", "text"))}
    last = json.dumps({"text": "", "finish_reason": "stop", "usage": usage}).encode()

    assert parse_event("message", b'{"text": "7", "tokens": 1, "logprob": -1.5}') == Chunk("7", 1, -1.5)
    assert parse_event("message", last) == LastChunk("", "stop", Usage(0, 1, 2, 3, 4))
    assert parse_event("error", b'{"error": "lost", "code": 502, "image": 3}') == StreamFailure("lost", 502, 3)


@pytest.mark.parametrize("data", [b"", b"[]", b"7", b"{}", b'{"text": 1, "finish_reason": "stop"}', b"[" * 10**5])
def test_invalid_events_are_rejected(data):
    with pytest.raises(ProtocolError):
        parse_event("message", data)


def parsed_events(chunks: ChunkParser, **event: Any) -> list[Any]:
    return chunks.read("message", json.dumps(event).encode())


def worded(text: str, *tokens: tuple[str, float]) -> dict[str, Any]:
    likely = {"content": [{"token": token, "logprob": logprob} for token, logprob in tokens]}
    return {"index": 0, "delta": {"content": text}, "logprobs": likely if tokens else None, "finish_reason": None}


@pytest.mark.parametrize(
    ("choice", "text", "tokens"),
    [
        (worded("ab", ("a", -1.0), ("b", -2.0)), "ab", 2),
        (worded("", ("\\xc3", -1.0)), "", 1),
        ({"index": 0, "delta": {"reasoning_content": "hm"}}, "", 1),
        ({"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}}, "", 1),
        ({"index": 0, "delta": {"content": "a"}, "token_ids": [5]}, "a", 1),
    ],
)
def test_what_a_chunk_says_beside_text_is_forwarded(choice: dict[str, Any], text: str, tokens: int) -> None:
    (chunk,) = parsed_events(ChunkParser(images=False), choices=[choice])

    assert (chunk.text, chunk.tokens) == (text, tokens)
    (written,) = chunk.written["choices"]
    assert written == {name: value for name, value in choice.items() if name != "finish_reason"}


@pytest.mark.parametrize(
    ("choice", "chunks"),
    [(worded("ab"), [Chunk("ab")]), (worded(""), []), ({"index": 0, "delta": {"role": "assistant"}}, [])],
)
def test_text_alone_is_a_plain_chunk(choice: dict[str, Any], chunks: list[Chunk]) -> None:
    assert parsed_events(ChunkParser(images=False), choices=[choice]) == chunks


@pytest.mark.parametrize(
    ("images", "details", "usage"),
    [
        (False, None, Usage(prompt=9, completion=2, text=9)),
        (True, None, Usage(prompt=9, completion=2)),
        (True, {"image_tokens": 4, "cached_tokens": 3}, Usage(prompt=9, completion=2, image=4, cached=3, text=5)),
    ],
    ids=["text", "images without a count", "images counted"],
)
def test_usage_is_taken_from_the_engine(
    images: bool,  # noqa: FBT001 - a parameter of the test
    details: dict[str, int] | None,
    usage: Usage,
) -> None:
    chunks = ChunkParser(images=images)
    reported = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": details}

    assert parsed_events(chunks, choices=[worded("") | {"finish_reason": "length"}], usage=None) == []
    assert parsed_events(chunks, choices=[], usage=reported) == []
    (last,) = chunks.end()
    assert isinstance(last, LastChunk)
    assert last.written is not None
    assert chunks.read("message", b"[DONE]") == [last]
    assert (last.finish_reason, last.usage, last.written["usage"]) == ("length", usage, reported)


@pytest.mark.parametrize(
    ("event", "failed"),
    [
        ({"error": {"message": "m", "code": 400}}, StreamFailure("m", 400)),
        ({"error": {"message": "m", "code": "server_error"}}, StreamFailure("m", 500)),
        ({"object": "error", "message": "m", "code": 503}, StreamFailure("m", 503)),
        ({"error": "m"}, StreamFailure("m", 500)),
        ({"error": {"type": "x"}}, StreamFailure("no reason given", 500)),
    ],
)
def test_errors_of_engines_are_recognized(event: dict[str, Any], failed: StreamFailure) -> None:
    assert parsed_events(ChunkParser(images=False), **event) == [failed]


@pytest.mark.parametrize(
    "data",
    [
        b"[1]",
        b"[" * 10**5,
        b'{"choices": [7]}',
        b'{"choices": [{"delta": "x"}]}',
        b'{"choices": [], "usage": {"prompt_tokens": -1}}',
        b'{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens_details": {"reasoning_tokens": "x"}}}',
        b'{"choices": [], "usage": {"prompt_tokens": 1e400}}',
        b'{"choices": [], "usage": {"prompt_tokens": 99999999999999999999}}',
    ],
)
def test_invalid_chunk_is_rejected(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="invalid chunk of a chat completion: "):
        ChunkParser(images=False).read("message", data)


def test_prefix_cache_is_salted_by_tenant() -> None:
    def request_body(**options: Any) -> dict[str, Any]:
        messages = bytes_tensor([b'[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]'])
        inputs = {"messages": messages, "options": bytes_tensor([json.dumps(options).encode()])}
        return dict(json.loads(completion_request("m", inputs, cache_salt="a")))

    known = {"model", "messages", "stream", "stream_options", "cache_salt"}
    own = request_body(tenant="b", deadline_seconds=1.0, top_k=0)
    assert (own["cache_salt"], set(own)) == (prefix_salt("a", ""), known)
    salted = request_body(cache_salt="c", unknown=1)
    assert (salted["cache_salt"], salted["unknown"]) == (prefix_salt("a", "c"), 1)


STREAM = (
    b': alive\n\ndata: {"a": 1}\n\nevent: error\r\ndata:no space\r\n\r\ndata: one\ndata: two\nid: 7\n\n:\n\ndata: re'
)
EVENTS = [("message", b'{"a": 1}'), ("error", b"no space"), ("message", b"one\ntwo")]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_do_not_depend_on_chunking(cuts):
    reader, edges = SseParser(), [0, *sorted(cuts), len(STREAM)]
    events = [event for start, stop in pairwise(edges) for event in reader.feed(STREAM[start:stop])]

    assert events == EVENTS


@pytest.mark.parametrize("stream", [b"data: " + b"x" * 2000, b"data: x\n" * 400])
def test_unbounded_event_is_rejected(stream):
    with pytest.raises(ProtocolError, match="more than 1000 bytes"):
        list(SseParser(1000).feed(stream))


def test_events_are_written_as_compact_json_of_any_size():
    for content in (
        {"text": "é \u2028", "n": [1, 0.5, None, True]},
        {"seed": 2**70},
        {"deep": json.loads("[" * 300 + "]" * 300)},
    ):
        written = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
        assert sse_event(content) == b"data: " + written + b"\n\n"
