"""Client side of the OpenAI chat API, for engines such as vLLM and SGLang.

The tensors of `internal_wire` become a request to `/v1/chat/completions`, and its chunks become the same events. What
the router does not read is forwarded unchanged in both directions. `cache_salt` separates tenants in the engine's
prefix cache.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from pybase64 import b64encode
from pydantic_core import from_json

from trimtab_pipelines.engines import UNKNOWN_ENGINE, EngineKind
from trimtab_protocol.chat.data_urls import restore_data_urls
from trimtab_protocol.chat.image_header import read_header
from trimtab_protocol.chat.internal_wire import (
    IMAGES,
    MESSAGES,
    OPTIONS,
    Chunk,
    Event,
    LastChunk,
    StreamFailure,
    Usage,
    split_media,
    without_router_options,
)
from trimtab_protocol.chat.openai_requests import require_forwardable
from trimtab_protocol.errors import InvalidChat, ProtocolError
from trimtab_protocol.tensors import Array, Buffer

COMPLETIONS = "/v1/chat/completions"
_CLIENT_ERROR_TYPES = frozenset({"BadRequestError", "exceed_context_size_error", "invalid_request_error"})
FAILURE_REASONS = frozenset({"abort", "error"})
"""Finish reasons of a response that the engine gave up."""
_ROUTER_CHUNK_FIELDS = frozenset({"id", "object", "created", "model", "system_fingerprint", "choices", "usage"})
_TEMPLATE_FIELDS = frozenset({"tools", "chat_template", "chat_template_kwargs", "add_generation_prompt"})
"""Fields that change the prompt of a chat."""
_MAX_TOKENS = 2**31


def completion_request(
    model: str,
    inputs: Mapping[str, Array],
    *,
    cache_salt: str,
    kind: EngineKind = UNKNOWN_ENGINE,
    processor_kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> bytes:
    """Body of a streamed chat completion with usage, for an engine that names its model `model`.

    Chats of equal `cache_salt` share prefixes in the engine's cache. `processor_kwargs` are those of the operating
    point.
    ``messages`` is [1], ``options`` [1] and ``images`` [1, images]; the last two are optional. Raises ProtocolError if
    the tensors are invalid.
    """
    files = [bytes(file) for file in inputs[IMAGES].reshape(-1)] if IMAGES in inputs else []
    options = _json(inputs[OPTIONS][0], OPTIONS) if OPTIONS in inputs else {}
    messages = _json(inputs[MESSAGES][0], MESSAGES)
    if not isinstance(options, dict) or not isinstance(messages, list):
        raise InvalidChat(f"{MESSAGES} must hold a JSON list, and {OPTIONS} a JSON object")
    require_forwardable(options)
    request = {name: value for name, value in without_router_options(options).items() if value is not None}
    if not request.get("top_k"):
        request.pop("top_k", None)  # 0 means all tokens, which engines express in different ways
    if "max_tokens" in request:
        request[kind.max_tokens] = request.pop("max_tokens")
    if kind.salts_prefixes or request.get("cache_salt"):
        request["cache_salt"] = prefix_salt(cache_salt, request.get("cache_salt") or "")
    if processor_kwargs and files:
        request["mm_processor_kwargs"] = dict(processor_kwargs)
    stream_options = {**(request.get("stream_options") or {}), "include_usage": True}
    request |= {"model": model, "stream": True, "stream_options": stream_options}
    # Images are joined once at the end, since json.dumps would copy them several times.
    return b"".join([_json_bytes(request)[:-1], b',"messages":', *_messages_json(messages, files), b"}"])


def prefix_salt(tenant: str, own: str) -> str:
    """Salt of a client's prefixes, `own` being its own; hashed, since engines refuse some characters and long ones."""
    return sha256(json.dumps([tenant, own]).encode()).hexdigest()


def tokenize_request(model: str, inputs: Mapping[str, Array]) -> bytes:
    """Body of a request that counts the tokens of a chat without images. Raises ProtocolError for an invalid chat."""
    options = _json(inputs[OPTIONS][0], OPTIONS) if OPTIONS in inputs else {}
    fields = {name: value for name, value in options.items() if name in _TEMPLATE_FIELDS}
    messages = _messages_json(_json(inputs[MESSAGES][0], MESSAGES), [])
    return b"".join([_json_bytes(fields | {"model": model})[:-1], b',"messages":', *messages, b"}"])


def _json_bytes(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _json(written: bytes, name: str) -> Any:
    try:
        return json.loads(written or b"{}")
    except (ValueError, RecursionError) as error:
        raise InvalidChat(f"{name} must hold JSON", param=name) from error


def _messages_json(messages: Sequence[Any], files: Sequence[bytes]) -> list[Buffer]:
    images, media = split_media(files)
    remaining, parts = iter(images), list[Buffer]([b"["])
    try:
        for turn, message in enumerate(messages):
            others = {name: value for name, value in message.items() if name != "content"}
            parts += [
                b"," * (turn > 0),
                *restore_data_urls(_json_bytes({"role": message["role"], **others})[:-1], media),
            ]
            if "content" in message:
                parts += [b',"content":', *_content_json(message["content"], remaining, media)]
            parts.append(b"}")
    except StopIteration:
        raise InvalidChat(f"{MESSAGES} reference more than the {len(images)} images", param=MESSAGES) from None
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidChat(f"{MESSAGES} must be a list of roles with their content", param=MESSAGES) from error
    if (unused := sum(1 for _ in remaining)) > 0:
        raise InvalidChat(f"{MESSAGES} do not reference {unused} of the images", param=MESSAGES)
    return [*parts, b"]"]


def _content_json(
    parts: Sequence[Mapping[str, Any]] | str | None, images: Iterator[bytes], media: Mapping[bytes, bytes]
) -> list[Buffer]:
    """Content of a message; a single text is a string, since some templates accept no list."""
    if parts is None or isinstance(parts, str):
        return [_json_bytes(parts)]
    if len(parts) == 1 and parts[0].keys() == {"type", "text"} and parts[0]["type"] == "text":
        return [_json_bytes(str(parts[0]["text"]))]
    encoded: list[Buffer] = [b"["]
    for index, part in enumerate(parts):
        encoded.append(b"," * (index > 0))
        encoded += (
            _image_json(part, next(images)) if part["type"] == "image" else restore_data_urls(_json_bytes(part), media)
        )
    return [*encoded, b"]"]


def _image_json(part: Mapping[str, Any], file: bytes) -> list[bytes]:
    others = {name: value for name, value in part.items() if name != "image_url"} | {"type": "image_url"}
    given = {name: value for name, value in (part.get("image_url") or {}).items() if name != "url"}
    details = _json_bytes(given)[:-1] + b"," * bool(given)
    return [_json_bytes(others)[:-1], b',"image_url":', details, b'"url":"', *_data_url(file), b'"}}']


def _data_url(file: bytes) -> tuple[bytes, bytes]:
    return f"data:image/{read_header(file, IMAGES).format};base64,".encode(), b64encode(file)


class ChunkParser:
    """Parses the chunks of a streamed response; if the chat has no images, all prompt tokens are text."""

    def __init__(self, *, images: bool) -> None:
        self._images = images
        self._finish_reason = ""
        self._usage: Usage | None = None
        self._fields: dict[str, Any] = {}
        """Fields of chunks that were not forwarded yet."""
        self._ending: dict[str, Any] = {}
        """The choice and the usage of the last chunks."""

    def read(self, _: str, data: bytes) -> list[Event]:
        """Events of one server-sent event; empty for the role.

        Raises ProtocolError if the chunk is invalid, or the response ended without finish_reason or usage.
        """
        if data.strip() == b"[DONE]":
            return [self._last()]
        try:
            return list(self._events(from_json(data, allow_inf_nan=False)))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            excerpt = data[:200].decode(errors="replace")
            raise ProtocolError(f"invalid chunk of a chat completion: {excerpt}") from error

    def end(self) -> list[Event]:
        """Events at the end of the stream: some engines send no [DONE]."""
        return [self._last()] if self._finish_reason and self._usage is not None else []

    def _events(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        if chunk.get("error") or chunk.get("object") == "error":
            message, code = parse_failure(chunk)
            yield StreamFailure(message or "no reason given", code)
            return
        self._fields |= {name: value for name, value in chunk.items() if name not in _ROUTER_CHUNK_FIELDS}
        usage, choices = chunk.get("usage"), [choice for choice in chunk["choices"] if not choice.get("index")]
        for choice in choices:
            if usage:
                self._fields["usage"] = usage
            yield from self._choice_events(choice)
        if usage:
            self._usage, self._ending["usage"] = parse_usage(usage, images=self._images), usage

    def _choice_events(self, choice: Mapping[str, Any]) -> Iterator[Event]:
        delta, reason = choice.get("delta") or {}, choice.get("finish_reason")
        said = {name for name, value in delta.items() if value and name != "role"}
        others = {name: v for name, v in choice.items() if v and name not in {"index", "delta", "finish_reason"}}
        if reason:
            self._finish_reason = str(reason)
            self._ending["choices"] = [{**{n: v for n, v in others.items() if n != "logprobs"}, "index": 0}]
            others = {name: value for name, value in others.items() if name == "logprobs"}
        if said or others:
            fields, self._fields = self._fields, {}
            special = said != {"content"} or others or any(fields.values())
            written = fields | {"choices": [{"index": 0, "delta": delta, **others}]} if special else None
            tokens = len((choice.get("logprobs") or {}).get("content") or ()) or 1
            yield Chunk(str(delta.get("content") or ""), tokens, None, written)
        if self._finish_reason in FAILURE_REASONS:
            yield StreamFailure(f"the engine ended its response with {self._finish_reason!r}", 500)

    def _last(self) -> LastChunk:
        if not self._finish_reason:
            raise ProtocolError("the response ended without a finish_reason")
        if self._usage is None:
            raise ProtocolError("the response has no usage: the engine must support stream_options")
        return LastChunk("", self._finish_reason, self._usage, self._fields | self._ending)


def parse_usage(usage: Mapping[str, Any], *, images: bool = False) -> Usage:
    """Token counts that an engine reports; text tokens are 0 if it does not tell them from those of `images`."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    prompt = _count(usage.get("prompt_tokens", usage.get("input_tokens")))
    image, cached = _count(details.get("image_tokens") or 0), _count(details.get("cached_tokens") or 0)
    for count in (usage.get("completion_tokens_details") or {}).values():
        _count(count or 0)
    completion = _count(usage.get("completion_tokens") or usage.get("output_tokens") or 0)
    text = 0 if images and not image else prompt - image
    return Usage(prompt, completion, image, cached, max(text, 0))


def _count(value: object) -> int:
    """A number of tokens. Raises ValueError for one that no response can have."""
    count = int(str(value))
    if not 0 <= count < _MAX_TOKENS:
        raise ValueError(f"{count} tokens")
    return count


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
