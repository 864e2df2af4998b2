"""Chat completion responses of the OpenAI API: complete responses, chunks, errors and the list of models."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab_protocol.chat.internal_wire import Chunk, LastChunk, Usage
from trimtab_protocol.sse import sse_event

Json = dict[str, Any]

_json_string = json.JSONEncoder(ensure_ascii=False).encode
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": \n\n"
"""A comment, which clients skip."""
STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_BY_REASON = {"UnknownModel": "model_not_found", "PayloadTooLarge": "request_too_large"}


@dataclass(frozen=True, slots=True)
class ResponseHeader:
    """Common fields of a response's chunks; `created` in Unix seconds."""

    id: str
    model: str
    created: int

    def fields(self, kind: str) -> Json:
        """First fields of an object of a kind."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def completion(heading: ResponseHeader, choices: Sequence[LastChunk], variant: str) -> Json:
    """A complete response; what an engine says beside the text is added as it was written."""
    written = [choice.whole or {} for choice in choices]
    others = {name: value for fields in written for name, value in fields.items() if name not in {"choices", "usage"}}
    return {
        **others,
        **heading.fields("chat.completion"),
        "system_fingerprint": variant,
        "choices": [
            _choice(index, choice, *fields.get("choices") or [{}])
            for index, (choice, fields) in enumerate(zip(choices, written, strict=True))
        ],
        "usage": usage(choices),
    }


def _choice(index: int, choice: LastChunk, written: Mapping[str, Any]) -> Json:
    delta = {name: value for name, value in (written.get("delta") or {}).items() if name not in {"role", "content"}}
    if isinstance(delta.get("tool_calls"), list):  # their index is a field of streams only
        calls = (call for call in delta["tool_calls"] if isinstance(call, dict))
        delta["tool_calls"] = [{name: value for name, value in call.items() if name != "index"} for call in calls]
    content = choice.text or ("" if not any(delta.values()) else None)
    return {
        "logprobs": None,
        **{name: value for name, value in written.items() if name != "delta"},
        "index": index,
        "message": {"role": "assistant", "content": content, "refusal": None, **delta},
        "finish_reason": choice.finish_reason,
    }


def dry_run_response(heading: ResponseHeader, took: Usage) -> Json:
    """Token usage of a chat without a response."""
    return heading.fields("chat.completion") | {"choices": [], "usage": usage([LastChunk("", "", took)])}


def usage(choices: Sequence[LastChunk]) -> Json:
    """Total usage of all choices, with the other counts of an engine; the prompt is counted once."""
    counts = [choice.usage for choice in choices]
    prompt = max((count.prompt for count in counts), default=0)
    completion_tokens = sum(count.completion for count in counts)
    reported = [choice.written.get("usage") or {} for choice in choices if choice.written]
    others = dict(reported[0]) if reported else {}
    if any(details := [report.get("completion_tokens_details") or {} for report in reported]):
        names = dict.fromkeys(name for detail in details for name in detail)
        others["completion_tokens_details"] = {name: sum(d.get(name) or 0 for d in details) for name in names}
    return {
        **others,
        "prompt_tokens": prompt,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt + completion_tokens,
        "prompt_tokens_details": {
            **(others.get("prompt_tokens_details") or {}),
            "cached_tokens": max((count.cached for count in counts), default=0),
            "image_tokens": max((count.image for count in counts), default=0),
            "text_tokens": max((count.text for count in counts), default=0),
        },
    }


class ChunkWriter:
    """Encodes the chunks of one response as server-sent events.

    If usage is included, the last chunk has it and the others have null.
    """

    def __init__(self, heading: ResponseHeader, *, includes_usage: bool, logprobs: bool) -> None:
        self._fields = heading.fields("chat.completion.chunk")
        self._without = {"usage": None} if includes_usage else {}
        self._includes_usage = includes_usage
        self._logprobs = logprobs
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """The constant JSON around the text of a chunk."""

    def variant(self, name: str) -> None:
        """Name the variant in the chunks from now on."""
        self._fields["system_fingerprint"] = name

    def first(self, choice: int) -> bytes:
        return self._chunk(choice, {"role": "assistant", "content": "", "refusal": None})

    def chunk(self, choice: int, piece: Chunk) -> bytes:
        """More text; empty without text."""
        if piece.written is not None:
            return self._written(choice, piece.written)
        if self._logprobs:
            return self._chunk(choice, {"content": piece.text}, pieces=[piece])
        if not piece.text:
            return b""
        if choice not in self._around:
            before, _, after = self._chunk(choice, {"content": ""}).rpartition(b'""')
            self._around[choice] = before, after
        before, after = self._around[choice]
        return b"".join((before, _json_string(piece.text).encode(), after))

    def last(self, choice: int, answer: LastChunk) -> bytes:
        """Text that was held back, and the finish reason."""
        rest = self._chunk(choice, {"content": answer.text}) if answer.text else b""
        if answer.written is None:
            return rest + self._chunk(choice, {}, finish_reason=answer.finish_reason)
        fields = {name: value for name, value in answer.written.items() if name != "usage"}
        return rest + self._written(choice, fields, finish_reason=answer.finish_reason)

    def end(self, choices: Sequence[LastChunk]) -> bytes:
        if not self._includes_usage:
            return DONE
        return sse_event(self._fields | {"choices": [], "usage": usage(choices)}) + DONE

    def _written(self, choice: int, chunk: Mapping[str, Any], *, finish_reason: str | None = None) -> bytes:
        """A third-party engine's chunk under this response's id, model and index."""
        own = {"index": choice, "finish_reason": finish_reason}
        choices = [{"delta": {}, "logprobs": None, **written, **own} for written in chunk.get("choices") or [{}]]
        others = {name: value for name, value in chunk.items() if name != "usage" or self._includes_usage}
        return sse_event({**self._without, **others, **self._fields, "choices": choices})

    def _chunk(
        self, choice: int, delta: Json, *, finish_reason: str | None = None, pieces: Sequence[Chunk] | None = None
    ) -> bytes:
        logprobs = token_logprobs(pieces) if pieces is not None else None
        entry = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return sse_event(self._fields | {"choices": [entry]} | self._without)


def error_body(
    status: int, message: str, *, reason: str = "", param: str | None = None, code: str | None = None
) -> Json:
    """Error object of a response or stream; programs read `reason` if there is no `code` of OpenAI."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or _BY_REASON.get(reason, reason)}}


def model_entry(name: str, created: int, max_tokens: int | None = None) -> Json:
    entry = {"id": name, "object": "model", "created": created, "owned_by": "trimtab"}
    return entry if max_tokens is None else entry | {"max_model_len": max_tokens}


def token_logprobs(pieces: Sequence[Chunk]) -> Json:
    """Log-probabilities of chunks of one token each."""
    content = [
        {"token": piece.text, "logprob": piece.logprob, "bytes": list(piece.text.encode()), "top_logprobs": []}
        for piece in pieces
        if piece.logprob is not None
    ]
    return {"content": content, "refusal": None}
