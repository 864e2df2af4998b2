"""OpenAI responses by their fields; tests/conformance uses the real client."""

import json

import pytest

from trimtab_protocol.chat import openai_responses
from trimtab_protocol.chat.internal_wire import (
    Chunk,
    LastChunk,
    StreamFailure,
    Usage,
    outputs_from_response,
    parse_event,
    responses_from_outputs,
)
from trimtab_protocol.chat.openai_responses import Choice, ChunkWriter, ResponseHeader
from trimtab_protocol.errors import ProtocolError

HEADING = ResponseHeader("chatcmpl-1", "m", 1700000000)
TOOK = Usage(prompt=31, completion=2, image=16, cached=5, text=15)


def events(raw):
    return [
        "[DONE]" if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))
        for line in raw.decode().split("\n\n")
        if line
    ]


def test_usage_counts_the_prompt_of_several_choices_once():
    assert openai_responses.usage([TOOK, TOOK]) == {
        "prompt_tokens": 31,
        "completion_tokens": 4,
        "total_tokens": 35,
        "prompt_tokens_details": {"cached_tokens": 5, "image_tokens": 16, "text_tokens": 15},
    }


def test_completion_has_message_and_usage():
    body = openai_responses.completion(HEADING, [Choice(LastChunk("7", "stop", TOOK), [Chunk("7", 1, -0.5)])])

    assert (body["object"], body["id"], body["created"]) == ("chat.completion", "chatcmpl-1", 1700000000)
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
    sent = events(raw + chunks.end([TOOK]))

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


def test_outputs_round_trip_to_responses():
    last = LastChunk("", "stop", TOOK)
    assert responses_from_outputs(outputs_from_response("é", last)) == [LastChunk("é", "stop", TOOK)]
