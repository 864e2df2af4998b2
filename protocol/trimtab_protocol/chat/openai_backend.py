"""Client side of the OpenAI chat API, for engines such as vLLM and SGLang.

The tensors of `internal_wire` become a request to `/v1/chat/completions`, and its chunks become the same events.
`top_k`, `min_tokens` and `ignore_eos` are engine extensions; `cache_salt` separates tenants in the engine's prefix
cache.
"""

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trimtab_protocol.chat.image_header import read_header
from trimtab_protocol.chat.internal_wire import IMAGES, MESSAGES, OPTIONS, Chunk, Event, LastChunk, StreamFailure, Usage
from trimtab_protocol.errors import InvalidChat, ProtocolError
from trimtab_protocol.tensors import Array

COMPLETIONS = "/v1/chat/completions"
_COPIED_OPTIONS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop",
    "ignore_eos",
    "logprobs",
    "seed",
)
_CLIENT_ERROR_TYPES = frozenset({"BadRequestError", "exceed_context_size_error", "invalid_request_error"})
_COMPLETE_REASONS = frozenset({"stop", "length", "content_filter"})
"""Finish reasons of a complete response; other reasons indicate a failure of the engine."""


def completion_request(model: str, inputs: Mapping[str, Array], *, cache_salt: str) -> bytes:
    """Body of a streamed chat completion with usage, for an engine that names its model `model`.

    Chats of equal `cache_salt` share prefixes in the engine's cache.
    ``messages`` is [1], ``options`` [1] and ``images`` [1, images]; the last two are optional. Raises ProtocolError if
    the tensors are invalid.
    """
    images = [bytes(file) for file in inputs[IMAGES].reshape(-1)] if IMAGES in inputs else []
    options = _json(inputs[OPTIONS][0], OPTIONS) if OPTIONS in inputs else {}
    messages = _json(inputs[MESSAGES][0], MESSAGES)
    if not isinstance(options, dict) or not isinstance(messages, list):
        raise InvalidChat(f"{MESSAGES} must hold a JSON list, and {OPTIONS} a JSON object")
    request = {name: options[name] for name in _COPIED_OPTIONS if options.get(name) is not None}
    if not request.get("top_k"):
        request.pop("top_k", None)  # 0 means all tokens, which engines express in different ways
    request |= {"model": model, "cache_salt": cache_salt, "stream": True, "stream_options": {"include_usage": True}}
    # Images are joined once at the end, since json.dumps would copy them several times.
    return b"".join([_json_bytes(request)[:-1], b',"messages":', *_messages_json(messages, images), b"}"])


def _json_bytes(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _json(written: bytes, name: str) -> Any:
    try:
        return json.loads(written or b"{}")
    except (ValueError, RecursionError) as error:
        raise InvalidChat(f"{name} must hold JSON", param=name) from error


def _messages_json(messages: Sequence[Any], images: Sequence[bytes]) -> list[bytes]:
    remaining, parts = iter(images), [b"["]
    try:
        for turn, message in enumerate(messages):
            parts += [b"," * (turn > 0), b'{"role":', _json_bytes(message["role"]), b',"content":']
            parts += [*_content_json(message["content"], remaining), b"}"]
    except StopIteration:
        raise InvalidChat(f"{MESSAGES} reference more than the {len(images)} images", param=MESSAGES) from None
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidChat(f"{MESSAGES} must be a list of roles with their content", param=MESSAGES) from error
    if (unused := sum(1 for _ in remaining)) > 0:
        raise InvalidChat(f"{MESSAGES} do not reference {unused} of the images", param=MESSAGES)
    return [*parts, b"]"]


def _content_json(parts: Sequence[Mapping[str, Any]] | str, images: Iterator[bytes]) -> list[bytes]:
    """Content of a message; a single text is a string, since some templates accept no list."""
    if isinstance(parts, str):
        return [_json_bytes(parts)]
    if len(parts) == 1 and parts[0]["type"] == "text":
        return [_json_bytes(str(parts[0]["text"]))]
    encoded = [b"["]
    for index, part in enumerate(parts):
        encoded.append(b"," * (index > 0))
        if part["type"] == "image":
            encoded += [b'{"type":"image_url","image_url":{"url":"', *_data_url(next(images)), b'"}}']
        else:
            encoded.append(_json_bytes({"type": "text", "text": str(part["text"])}))
    return [*encoded, b"]"]


def _data_url(file: bytes) -> tuple[bytes, bytes]:
    return f"data:image/{read_header(file, IMAGES).format};base64,".encode(), b64encode(file)


class ChunkParser:
    """Parses the chunks of a streamed response; if the chat has no images, all prompt tokens are text."""

    def __init__(self, *, images: bool) -> None:
        self._images = images
        self._finish_reason = ""
        self._usage: Usage | None = None

    def read(self, _: str, data: bytes) -> list[Event]:
        """Events of one server-sent event; empty for the role.

        Raises ProtocolError if the chunk is invalid, or the response ended without finish_reason or usage.
        """
        if data.strip() == b"[DONE]":
            return [self._last()]
        try:
            return list(self._events(json.loads(data)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            excerpt = data[:200].decode(errors="replace")
            raise ProtocolError(f"invalid chunk of a chat completion: {excerpt}") from error

    def _events(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        if chunk.get("error") or chunk.get("object") == "error":
            message, code = parse_failure(chunk)
            yield StreamFailure(message or "no reason given", code)
            return
        for choice in chunk["choices"]:
            text = (choice.get("delta") or {}).get("content") or ""
            yield from _chunks(text, (choice.get("logprobs") or {}).get("content") or ())
            self._finish_reason = str(choice.get("finish_reason") or self._finish_reason)
        if self._finish_reason and self._finish_reason not in _COMPLETE_REASONS:
            yield StreamFailure(f"the engine ended its response with {self._finish_reason!r}", 500)
        if chunk.get("usage"):
            self._usage = self._usage_of(chunk["usage"])

    def _usage_of(self, usage: Mapping[str, Any]) -> Usage:
        details, prompt = usage.get("prompt_tokens_details") or {}, int(usage["prompt_tokens"])
        image = int(details.get("image_tokens") or 0)
        text = 0 if self._images and not image else prompt - image  # 0 if the engine does not report image tokens
        return Usage(prompt, int(usage["completion_tokens"]), image, int(details.get("cached_tokens") or 0), text)

    def _last(self) -> LastChunk:
        if not self._finish_reason:
            raise ProtocolError("the response ended without a finish_reason")
        if self._usage is None:
            raise ProtocolError("the response has no usage: the engine must support stream_options")
        return LastChunk("", self._finish_reason, self._usage)


def _chunks(text: str, tokens: Sequence[Mapping[str, Any]]) -> Iterator[Chunk]:
    """One chunk per token if their texts are known; else one chunk with the tokens' total probability."""
    if "".join(str(token["token"]) for token in tokens) == text and tokens:
        yield from (Chunk(str(token["token"]), 1, float(token["logprob"])) for token in tokens)
    elif tokens:
        yield Chunk(text, len(tokens), sum(float(token["logprob"]) for token in tokens))
    elif text:
        yield Chunk(text)


def parse_failure(body: Mapping[str, Any]) -> tuple[str, int]:
    """Message and HTTP status of an error; empty and 500 if absent. Its code may be a word instead of a status."""
    error = body.get("error") or body
    if not isinstance(error, Mapping):
        return str(error), 500
    code = error.get("code")
    message = str(error.get("message") or error.get("detail") or "")
    if isinstance(code, int) and 400 <= code < 600:
        return message, code
    return message, 400 if error.get("type") in _CLIENT_ERROR_TYPES else 500
