"""Server-sent events, and the chunks of OpenAI-compatible engines: tokens, log probabilities, usage and errors."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_protocol import ProtocolError
from trimtab_protocol.chat.internal_wire import Chunk, LastChunk, StreamFailure, Usage, bytes_tensor
from trimtab_protocol.chat.openai_backend import ChunkParser, completion_request
from trimtab_protocol.sse import SseParser


def parsed_events(chunks: ChunkParser, **event: Any) -> list[Any]:
    return chunks.read("message", json.dumps(event).encode())


def worded(text: str, *tokens: tuple[str, float]) -> dict[str, Any]:
    likely = {"content": [{"token": token, "logprob": logprob} for token, logprob in tokens]}
    return {"index": 0, "delta": {"content": text}, "logprobs": likely if tokens else None, "finish_reason": None}


@pytest.mark.parametrize(
    ("choice", "pieces"),
    [
        (worded("ab"), [Chunk("ab")]),
        (worded(""), []),
        (worded("ab", ("a", -1.0), ("b", -2.0)), [Chunk("a", 1, -1.0), Chunk("b", 1, -2.0)]),
        (worded("ä", ("\\xc3", -1.0), ("\\xa4", -2.0)), [Chunk("ä", 2, -3.0)]),
        (worded("", ("\\xc3", -1.0)), [Chunk("", 1, -1.0)]),
        ({"index": 0, "delta": {"role": "assistant"}}, []),
    ],
)
def test_each_token_is_a_chunk_if_its_text_is_known(choice: dict[str, Any], pieces: list[Chunk]) -> None:
    assert parsed_events(ChunkParser(images=False), choices=[choice]) == pieces


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
    assert chunks.read("message", b"[DONE]") == [LastChunk("", "length", usage)]


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


def test_invalid_chunk_is_rejected() -> None:
    with pytest.raises(ProtocolError, match="invalid chunk of a chat completion: \\[1\\]"):
        ChunkParser(images=False).read("message", b"[1]")


def test_prefix_cache_is_salted_by_tenant() -> None:
    def request_body(**options: Any) -> dict[str, Any]:
        messages = bytes_tensor([b'[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]'])
        body = completion_request("m", {"messages": messages, "options": bytes_tensor([json.dumps(options).encode()])})
        return dict(json.loads(body))

    assert request_body(tenant="a", deadline_seconds=1.0, top_k=0)["cache_salt"] == "a"
    assert request_body(unknown=1).keys() == {"model", "messages", "stream", "stream_options"}


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
