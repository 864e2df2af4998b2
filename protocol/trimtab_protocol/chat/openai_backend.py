"""A chat for an engine that speaks OpenAI's API itself, and what it streams back. Pure.

The other side of `inner`: the same tensors become a request to `/v1/chat/completions`, and its chunks become the same
pieces. Only what engines take is said: `top_k`, `min_tokens` and `ignore_eos` are theirs beside OpenAI's fields, and
`cache_salt` keeps apart what tenants leave in a cache of prompts.
"""

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trimtab_protocol.chat.errors import InvalidChat
from trimtab_protocol.chat.image_header import read_header
from trimtab_protocol.chat.internal_wire import IMAGES, MESSAGES, OPTIONS, Chunk, Event, LastChunk, StreamFailure, Usage
from trimtab_protocol.errors import ProtocolError
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
_COMPLETE_REASONS = frozenset({"stop", "length", "content_filter"})
"""Why an answer may end that is one; an engine that gave up says so by another reason."""


def completion_request(model: str, inputs: Mapping[str, Array]) -> bytes:
    """The body that asks for one chat, streamed and with what it took.

    Args:
        model: what the engine calls it.
        inputs: ``messages`` [1], ``options`` [1] and ``images`` [1, images], the last two where there are any.

    Raises:
        ProtocolError: the tensors are no chat.
    """
    images = [bytes(file) for file in inputs[IMAGES].reshape(-1)] if IMAGES in inputs else []
    options = _json(inputs[OPTIONS][0], OPTIONS) if OPTIONS in inputs else {}
    messages = _json(inputs[MESSAGES][0], MESSAGES)
    if not isinstance(options, dict) or not isinstance(messages, list):
        raise InvalidChat(f"{MESSAGES} must hold a JSON list, and {OPTIONS} a JSON object")
    asked = {name: options[name] for name in _COPIED_OPTIONS if options.get(name) is not None}
    if not asked.get("top_k"):
        asked.pop("top_k", None)  # 0 means all of them, which engines write in different ways
    if tenant := options.get("tenant"):
        asked["cache_salt"] = str(tenant)
    asked |= {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    # Images are joined once, at the end: as strings of one value they would be copied thrice, while all others wait.
    return b"".join([_dumped(asked)[:-1], b',"messages":', *_shown(messages, images), b"}"])


def _dumped(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _json(written: bytes, name: str) -> Any:
    try:
        return json.loads(written or b"{}")
    except (ValueError, RecursionError) as error:
        raise InvalidChat(f"{name} must hold JSON", param=name) from error


def _shown(messages: Sequence[Any], images: Sequence[bytes]) -> list[bytes]:
    """The messages with each image at its place, as pieces of JSON."""
    left, pieces = iter(images), [b"["]
    try:
        for turn, message in enumerate(messages):
            pieces += [b"," * (turn > 0), b'{"role":', _dumped(message["role"]), b',"content":']
            pieces += [*_content(message["content"], left), b"}"]
    except StopIteration:
        raise InvalidChat(f"{MESSAGES} show more images than the {len(images)} there are", param=MESSAGES) from None
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidChat(f"{MESSAGES} must be a list of roles with their content", param=MESSAGES) from error
    if (more := sum(1 for _ in left)) > 0:
        raise InvalidChat(f"{MESSAGES} show {more} fewer images than there are", param=MESSAGES)
    return [*pieces, b"]"]


def _content(parts: Sequence[Mapping[str, Any]] | str, images: Iterator[bytes]) -> list[bytes]:
    """Text alone as text: models that read nothing else have templates that take no list."""
    if isinstance(parts, str):
        return [_dumped(parts)]
    if len(parts) == 1 and parts[0]["type"] == "text":
        return [_dumped(str(parts[0]["text"]))]
    pieces = [b"["]
    for place, part in enumerate(parts):
        pieces.append(b"," * (place > 0))
        if part["type"] == "image":
            pieces += [b'{"type":"image_url","image_url":{"url":"', *_data_url(next(images)), b'"}}']
        else:
            pieces.append(_dumped({"type": "text", "text": str(part["text"])}))
    return [*pieces, b"]"]


def _data_url(file: bytes) -> tuple[bytes, bytes]:
    return f"data:image/{read_header(file, IMAGES).format};base64,".encode(), b64encode(file)


class ChunkParser:
    """The pieces of one streamed answer, from its chunks.

    Args:
        images: whether its chat shows any; of one without, all tokens of the prompt are text.
    """

    def __init__(self, *, images: bool) -> None:
        self._images = images
        self._finish_reason = ""
        self._usage: Usage | None = None

    def read(self, _: str, data: bytes) -> list[Event]:
        """What one server-sent event says; nothing, where it only says who speaks.

        Raises:
            ProtocolError: it is no chunk, or the answer ended without a reason or without what it took.
        """
        if data.strip() == b"[DONE]":
            return [self._last()]
        try:
            return list(self._said(json.loads(data)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            shown = data[:200].decode(errors="replace")
            raise ProtocolError(f"an event that is no chunk of a chat completion: {shown}") from error

    def _said(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        if chunk.get("error") or chunk.get("object") == "error":
            why, code = parse_failure(chunk)
            yield StreamFailure(why or "it did not say why", code)
            return
        for choice in chunk["choices"]:
            text = (choice.get("delta") or {}).get("content") or ""
            yield from _pieces(text, (choice.get("logprobs") or {}).get("content") or ())
            self._finish_reason = str(choice.get("finish_reason") or self._finish_reason)
        if self._finish_reason and self._finish_reason not in _COMPLETE_REASONS:
            yield StreamFailure(f"it ended its answer by {self._finish_reason!r}", 500)
        if chunk.get("usage"):
            self._usage = self._told(chunk["usage"])

    def _told(self, usage: Mapping[str, Any]) -> Usage:
        details, prompt = usage.get("prompt_tokens_details") or {}, int(usage["prompt_tokens"])
        image = int(details.get("image_tokens") or 0)
        text = 0 if self._images and not image else prompt - image  # of which nobody told which are which
        return Usage(prompt, int(usage["completion_tokens"]), image, int(details.get("cached_tokens") or 0), text)

    def _last(self) -> LastChunk:
        if not self._finish_reason:
            raise ProtocolError("an answer that ended without a finish_reason")
        if self._usage is None:
            raise ProtocolError("an answer that did not say what it took: its engine must heed stream_options")
        return LastChunk("", self._finish_reason, self._usage)


def _pieces(text: str, tokens: Sequence[Mapping[str, Any]]) -> Iterator[Chunk]:
    """A piece for each token where their texts are known; else one, as likely as all its tokens together."""
    if "".join(str(token["token"]) for token in tokens) == text and tokens:
        yield from (Chunk(str(token["token"]), 1, float(token["logprob"])) for token in tokens)
    elif tokens:
        yield Chunk(text, len(tokens), sum(float(token["logprob"]) for token in tokens))
    elif text:
        yield Chunk(text)


def parse_failure(told: Mapping[str, Any]) -> tuple[str, int]:
    """What an error says, empty where it says nothing, and its HTTP status; 500 where it names none."""
    error = told.get("error") or told
    if not isinstance(error, Mapping):
        return str(error), 500
    code = error.get("code")
    message = str(error.get("message") or error.get("detail") or "")
    return message, code if isinstance(code, int) and 400 <= code < 600 else 500
