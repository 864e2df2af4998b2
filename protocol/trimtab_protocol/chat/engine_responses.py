"""Parsers of the responses to forwarded requests, and `ForwardedChunkWriter`, which streams them to clients.

They yield the events of chats, with what the engine wrote beside the usage that the router counts.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from trimtab_protocol.chat.engine_routes import ForwardedRequest
from trimtab_protocol.chat.internal_wire import Chunk, Event, LastChunk, StreamFailure, Usage
from trimtab_protocol.chat.openai_backend import FAILURE_REASONS, parse_failure, parse_usage
from trimtab_protocol.chat.openai_responses import DONE
from trimtab_protocol.errors import ProtocolError
from trimtab_protocol.rest import JSON_CONTENT_TYPE
from trimtab_protocol.sse import SseParser, sse_event

# Possessive: otherwise a long match takes a hundred times its bytes.
_USAGE = re.compile(rb'(?<!\\)"usage"\s*:\s*(\{(?:[^{}]++|\{[^{}]*+\})*+\})')
_MODEL = re.compile(r'(?<!\\)"model"\s*:\s*"(?:[^"\\]++|\\.)*+"')
_COUNTED = frozenset({"prompt_tokens", "input_tokens"})
_FINAL = frozenset({"response.completed", "response.incomplete"})
_FAILED = frozenset({"error", "response.failed"})
_BEGINNINGS = frozenset(
    {"response.created", "response.queued", "response.in_progress", "response.output_item.added"}
    | {"response.content_part.added"}
)
"""Events that come before any output, so that a request that fails after them can be retried."""


class WholeParser:
    """Parses a response that is no stream. It is not read as JSON, which may be megabytes of embeddings."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        self._parts.append(data)
        return iter(())

    def end(self) -> list[Event]:
        body = b"".join(self._parts)
        usage, found = Usage(), _USAGE.search(body)
        try:
            if found is not None and _COUNTED & (counts := from_json(found[1])).keys():
                usage = parse_usage(counts)
            return [LastChunk(body.decode(), "stop", usage)]
        except (ValueError, TypeError, AttributeError) as error:
            raise ProtocolError(f"invalid response: {body[:200].decode(errors='replace')}") from error


class StreamParser:
    """Parses a stream of completions, or of the events of a response in OpenAI's responses API."""

    def __init__(self, request: ForwardedRequest) -> None:
        self.feed = SseParser().feed
        self._read = self._response if request.route.sends_events else self._completion
        self._streams = request.streams
        self._held: list[dict[str, Any]] = []
        self._finish_reason = ""
        self._usage: Usage | None = None
        self._final: dict[str, Any] = {}
        self._ended = False

    def read(self, _: str, data: bytes) -> Sequence[Event]:
        """Events of one server-sent event. Raises ProtocolError if it is invalid."""
        if data.strip() == b"[DONE]":
            return self.end(required=True)
        try:
            event = from_json(data, allow_inf_nan=False)
            if event.get("error") and event.get("type") not in _FAILED:
                message, code = parse_failure(event)
                return (StreamFailure(message or "no reason given", code),)
            return tuple(self._read(event))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ProtocolError(f"invalid event: {data[:200].decode(errors='replace')}") from error

    def end(self, *, required: bool = False) -> Sequence[Event]:
        """Last chunk, once: some engines send no [DONE]. Raises ProtocolError if a `required` one is missing."""
        if self._ended:
            return ()
        if not self._finish_reason or self._usage is None:
            if required:
                raise ProtocolError("the response ended without a reason or usage")
            return ()
        self._ended = True
        return (LastChunk("", self._finish_reason, self._usage, self._final),)

    def _completion(self, chunk: dict[str, Any]) -> Iterator[Event]:
        if usage := chunk.get("usage"):
            self._usage = parse_usage(usage)
        reasons = [str(choice["finish_reason"]) for choice in chunk["choices"] if choice.get("finish_reason")]
        if FAILURE_REASONS & set(reasons):
            yield StreamFailure(f"the engine ended its response with {reasons[0]!r}", 500)
        self._finish_reason = self._finish_reason or "".join(reasons[:1])
        if chunk["choices"]:
            yield Chunk("", written=chunk)
        else:
            self._final = chunk

    def _response(self, event: dict[str, Any]) -> Iterator[Event]:
        kind = str(event["type"])
        if kind in _FAILED:
            message, code = parse_failure(event.get("response") or event)
            yield StreamFailure(message or "no reason given", code)
        elif kind in _FINAL:
            response = event["response"]
            self._usage = parse_usage(response.get("usage") or {"input_tokens": 0})
            self._finish_reason = "stop" if kind == "response.completed" else "length"
            self._final = {"events": [*self._held, event]} if self._streams else event
            yield from self.end()
        else:
            self._held.append(event)
            if kind not in _BEGINNINGS:
                written = {"events": self._held} if self._streams else None
                self._held = []
                yield Chunk("", written=written)


def response_parser(request: ForwardedRequest) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Functions that split bytes into server-sent events, parse one, and end the response."""
    if request.route.streams:
        stream = StreamParser(request)
        return stream.feed, stream.read, stream.end
    whole = WholeParser()
    return whole.feed, lambda *_: (), whole.end


def whole_response(last: LastChunk, model: str) -> tuple[str, bytes]:
    """Content type and body of a whole response, under the name of the client's model."""
    if last.whole is not None:
        merged = named(last.whole, model)
        return JSON_CONTENT_TYPE, json.dumps(merged.get("response", merged), ensure_ascii=False).encode()
    if not last.text.startswith(("{", "[", '"')):
        return "text/plain; charset=utf-8", last.text.encode()
    name = f'"model":{json.dumps(model)}'
    return JSON_CONTENT_TYPE, _MODEL.sub(lambda _: name, last.text).encode()


def named(written: Mapping[str, Any], model: str) -> dict[str, Any]:
    """An object that an engine wrote, under the name of the client's model."""
    fields = dict(written)
    if "model" in fields:
        fields["model"] = model
    if isinstance(fields.get("response"), dict):
        fields["response"] = named(fields["response"], model)
    return fields


class ForwardedChunkWriter:
    """Encodes the chunks of one forwarded response as server-sent events."""

    def __init__(self, request: ForwardedRequest, model: str) -> None:
        self._request = request
        self._model = model
        self._events = request.route.sends_events

    def variant(self, name: str) -> None:
        """Engines' events have no field for it."""

    def first(self, choice: int) -> bytes:  # noqa: ARG002 - chats begin with their role
        return b""

    def chunk(self, choice: int, chunk: Chunk | LastChunk) -> bytes:  # noqa: ARG002 - events name their choice
        written = chunk.written or {}
        if self._events:
            return b"".join(map(self._event, written.get("events", ())))
        if not self._request.includes_usage:
            written = {name: value for name, value in written.items() if name != "usage"}
            if not written.get("choices"):
                return b""
        return sse_event(named(written, self._model))

    last = chunk

    def end(self, choices: Sequence[LastChunk]) -> bytes:  # noqa: ARG002 - the engine has written the usage
        return b"" if self._events else DONE

    def _event(self, event: Mapping[str, Any]) -> bytes:
        return b"event: %s\n" % str(event["type"]).encode() + sse_event(named(event, self._model))
