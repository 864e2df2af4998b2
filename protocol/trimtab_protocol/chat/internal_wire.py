"""Internal form of a chat between router and model server (decision 41): tensors in requests, events in responses."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from trimtab_pipelines import stages
from trimtab_protocol.chat.data_urls import MEDIA_MARKER
from trimtab_protocol.chat.openai_requests import ChatRequest, Message, is_image_part
from trimtab_protocol.errors import ProtocolError
from trimtab_protocol.sse import sse_event
from trimtab_protocol.tensors import Array, Buffer, bytes_array

MESSAGES, OPTIONS, IMAGES = stages.MESSAGES_INPUT, "options", stages.IMAGES_INPUT
"""Inputs of a chat pipeline; the last two are optional."""
TEXT, FINISH_REASON, USAGE = "text", "finish_reason", "usage"
"""Outputs of a chat pipeline."""
STORE_AS = "store_as"
"""Request parameter of an encoder: the name under which the embeddings of a batch are stored."""
TENANTS = "tenants"
"""Request parameter of chats and of their images, set by the router only; see `dump_tenants`."""
PARTIAL_PREFILL, MAX_PROMPT_TOKENS = "partial_prefill", "max_prompt_tokens"
"""Metadata of a generation model: whether it can prefill a prompt up to the first pending image."""
_STREAM_OPTIONS = "stream_options"
_TENANT, _DEADLINE = "tenant", "deadline_seconds"
"""Options set by the router only: the tenant, which only replicas of the previous version read there, and the seconds
until the first token is due.
"""
_COUNTS = ("prompt_tokens", "completion_tokens", "image_tokens", "cached_tokens", "text_tokens")
"""Fields of an event's usage, in the order of a row of the output `usage`."""
_ROWS = re.compile(r"[0-9]{1,9}(,[0-9]{1,9})*")
_EMBEDDING_ID = re.compile(r"(?P<batch>.*/[^/]+)-(?P<row>[0-9]{1,9})", re.DOTALL)


Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token usage of a response; image and cached tokens are part of the prompt."""

    prompt: int = 0
    completion: int = 0
    image: int = 0
    cached: int = 0
    text: int = 0

    @classmethod
    def of(cls, counts: Sequence[int]) -> "Usage":
        return cls(*map(int, counts))

    def row(self) -> list[int]:
        return [self.prompt, self.completion, self.image, self.cached, self.text]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a response; tokens may arrive before their text is complete."""

    text: str
    tokens: int = 1
    logprob: float | None = None
    written: Json | None = None
    """A third-party engine's chunk, with one choice, if it says more than the text."""


@dataclass(frozen=True, slots=True)
class LastChunk:
    """End of a response, with text that was held back."""

    text: str
    finish_reason: str
    usage: Usage
    written: Json | None = None
    """The last chunk of a third-party engine, with its usage."""
    whole: Json | None = None
    """The merged chunks of a response that is not streamed to its client, if they say more than their text."""


@dataclass(frozen=True, slots=True)
class StreamFailure:
    """Failure of a response; `image` is the index of the image that caused it, if any."""

    message: str
    code: int
    image: int | None = None


Event = Chunk | LastChunk | StreamFailure


def options_per_choice(request: ChatRequest, *, tenant: str, forwarded: bool = False) -> list[dict[str, Any]]:
    """The tensor `options` of each choice; absent options are omitted. `forwarded`: with all other fields."""
    max_tokens = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    options = {
        "max_tokens": max_tokens,
        "min_tokens": request.min_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": max(request.top_k, 0) if request.top_k is not None else None,
        "stop": list(request.stop) or None,
        "ignore_eos": request.ignore_eos or None,
        "logprobs": request.logprobs or None,
    }
    present: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if forwarded:
        stream_options = request.stream_options.others if request.stream_options is not None else {}
        present |= {**request.others, **({_STREAM_OPTIONS: {**stream_options}} if stream_options else {})}
    base = options_with_tenant(present, tenant=tenant)
    if request.seed is None:
        return [base] * request.choices
    return [base | {"seed": request.seed + choice} for choice in range(request.choices)]


def options_with_tenant(options: Mapping[str, Any], *, tenant: str) -> dict[str, Any]:
    """Options with the router's tenant and without a deadline; an empty tenant is omitted."""
    return without_router_options(options) | ({_TENANT: tenant} if tenant else {})


def without_router_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in (_TENANT, _DEADLINE)}


def dump_tenants(tenants: Sequence[str]) -> str:
    """The parameter `tenants`: the tenant of each row, empty if unknown. Replicas share caches within a tenant only."""
    return json.dumps(tenants)


def parse_tenants(parameter: object, rows: int) -> list[str]:
    """Tenants of a request's rows, empty if unknown. Raises ProtocolError if the parameter is invalid."""
    try:
        tenants = [""] * rows if parameter is None else json.loads(str(parameter))
    except (ValueError, RecursionError):
        tenants = None
    if not isinstance(tenants, list) or len(tenants) != rows or not all(isinstance(name, str) for name in tenants):
        raise ProtocolError(f"parameter {TENANTS!r} must be a JSON list of {rows} texts, one for each row")
    return tenants


def options_with_deadline(options: bytes, left_seconds: float) -> bytes:
    """A row of the tensor `options` with the time until its first token is due, negative if that has passed.

    Anything but a JSON object is returned unchanged and rejected by the replica.
    """
    try:
        fields = json.loads(options)
    except (ValueError, RecursionError):
        return options
    return json.dumps(fields | {_DEADLINE: round(left_seconds, 6)}).encode() if isinstance(fields, dict) else options


def message_values(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The tensor `messages`: text, and placeholders of images."""
    return [
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": [
                {"type": "image"} if part.is_image else {"type": "text", "text": part.text or ""}
                for part in message.content
            ],
        }
        for message in messages
    ]


def written_messages(messages: Sequence[Any]) -> list[Any]:
    """The tensor `messages` for a third-party engine: as written, with placeholders of images."""
    return [
        message | {"content": [_written_part(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _written_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    if not is_image_part(part["type"]):
        return part
    source = part.get("image_url")
    kept = {name: value for name, value in part.items() if name not in {"type", "image", "image_url"}}
    details = {name: value for name, value in source.items() if name != "url"} if isinstance(source, dict) else {}
    return kept | ({"image_url": details} if details else {}) | {"type": "image"}


def chat_tensors(
    messages: Sequence[Any],
    images: Sequence[bytes],
    options: Sequence[Mapping[str, Any]],
    media: Mapping[str, Buffer] = MappingProxyType({}),
) -> dict[str, Array]:
    """Inputs of a chat, one row per choice; rows share equal values. Media follow the images, with their markers."""
    rows = len(options)
    text = json.dumps(messages, ensure_ascii=False, separators=(",", ":")).encode()
    inputs = {
        MESSAGES: bytes_tensor([text] * rows),
        OPTIONS: bytes_tensor([json.dumps(row).encode() for row in options]),
    }
    if images or media:
        files = np.empty((rows, len(images) + len(media)), dtype=object)
        for row in range(rows):
            files[row, : len(images)] = images
            files[row, len(images) :] = [b"%s=%s" % (marker.encode(), url) for marker, url in media.items()]
        inputs[IMAGES] = files
    return inputs


def split_media(files: Sequence[bytes]) -> tuple[list[bytes], dict[bytes, bytes]]:
    """Images of a chat, and its other media by marker: data URLs as JSON has them."""
    media = [file for file in files if file.startswith(MEDIA_MARKER)]
    pairs = (file.partition(b"=") for file in media)
    return [file for file in files if not file.startswith(MEDIA_MARKER)], {marker: url for marker, _, url in pairs}


def outputs_from_responses(responses: Sequence[tuple[str, LastChunk]]) -> dict[str, Array]:
    """Outputs of responses, each its whole text and its last chunk."""
    return {
        TEXT: bytes_tensor([text.encode() for text, _ in responses]),
        FINISH_REASON: bytes_tensor([last.finish_reason.encode() for _, last in responses]),
        USAGE: np.array([last.usage.row() for _, last in responses], dtype=np.int64),
    }


def bytes_tensor(elements: Sequence[bytes]) -> Array:
    return bytes_array(elements, (len(elements),))


def content_id(encoder: str, file_digest: str, rows: int) -> str:
    """Identity of an encoded image, equal if embeddings of `rows` rows are equal.

    `encoder` names the encoder and its weights; the digest is SHA-256 of the image file, in hex.
    """
    return f"{encoder}:{file_digest}:{rows}"


def encoder_of_content(content: str) -> str:
    """The encoder of a content id; empty if unknown."""
    return content.rsplit(":", 2)[0] if content.count(":") > 1 else ""


def embedding_id(name: str, row: int) -> str:
    """Name under which a replica stores the embedding of one row of a batch."""
    return f"{name}-{row}"


def expand_embedding_ids(names: str) -> list[str]:
    """Names of several rows of one batch, written as ``NAME-0,2,3``; or a single name."""
    name, _, rows = names.rpartition("-")
    return [embedding_id(name, int(row)) for row in rows.split(",")] if _ROWS.fullmatch(rows) and name else [names]


def group_embedding_urls(urls: Sequence[str]) -> dict[str, list[int]]:
    """One URL for all embeddings of a batch at a replica, with the indices of those in ``urls``."""
    batches: dict[str, list[tuple[str, int]]] = {}
    for index, url in enumerate(urls):
        match = _EMBEDDING_ID.fullmatch(url)
        batches.setdefault(match["batch"] if match else url, []).append((match["row"] if match else "", index))
    return {
        f"{batch}-{','.join(row for row, _ in rows)}" if rows[0][0] else batch: [index for _, index in rows]
        for batch, rows in batches.items()
    }


def dump_event(event: Event) -> bytes:
    """Serialize an event as a server-sent event of a model server, as `parse_event` reads it."""
    content: dict[str, object]
    match event:
        case StreamFailure(message, code, image):
            content = {"error": message, "code": code}
            return b"event: error\n" + sse_event(content if image is None else {**content, "image": image})
        case LastChunk(text, finish_reason, usage):
            counts = dict(zip(_COUNTS, usage.row(), strict=True))
            return sse_event({"text": text, "finish_reason": finish_reason, "usage": counts})
        case Chunk(text, tokens, logprob):
            content = {"text": text, "tokens": tokens}
            return sse_event(content if logprob is None else {**content, "logprob": round(logprob, 6)})


def parse_event(kind: str, data: bytes) -> Event:
    """Parse a server-sent event of a model server. Raises ProtocolError if the event is invalid."""
    try:
        event = json.loads(data)
        if kind == "error" or "error" in event:
            return StreamFailure(str(event["error"]), int(event.get("code", 500)), event.get("image"))
        if "finish_reason" in event:
            usage = Usage.of([event["usage"][name] for name in _COUNTS])
            return LastChunk(str(event["text"]), str(event["finish_reason"]), usage)
        return Chunk(str(event["text"]), int(event.get("tokens", 1)), event.get("logprob"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(
            f"unknown event in the model server's stream: {data[:200].decode(errors='replace')}"
        ) from error
