"""A chat between router and model server, as decision 41 has it: tensors there, events back. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trimtab_pipelines import stages
from trimtab_protocol.chat.openai_requests import ChatRequest, ContentPart, Message
from trimtab_protocol.errors import ProtocolError
from trimtab_protocol.tensors import Array

MESSAGES, OPTIONS, IMAGES = stages.MESSAGES_INPUT, "options", stages.IMAGES_INPUT
"""The inputs of a chat's pipeline; the last two may be left out."""
TEXT, FINISH_REASON, USAGE = "text", "finish_reason", "usage"
"""Its outputs."""
STORE_AS = "store_as"
"""The parameter of a request to a stage that encodes which says under what name each row's embeddings are kept."""


PARTIAL_PREFILL = "partial_prefill"
"""The fact about a model that writes which says whether it reads a prompt up to the first image that is missing."""


_TENANT, _DEADLINE = "tenant", "deadline_seconds"
"""The options that no caller says: whose a chat is, and within how many seconds its answer is due to begin."""
_ROWS = re.compile(r"[0-9]{1,9}(,[0-9]{1,9})*")
_EMBEDDING_ID = re.compile(r"(?P<batch>.*/[^/]+)-(?P<row>[0-9]{1,9})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer took, in tokens; images and cached ones are of the prompt."""

    prompt: int = 0
    completion: int = 0
    image: int = 0
    cached: int = 0
    text: int = 0

    @classmethod
    def of(cls, counts: Sequence[int]) -> "Usage":
        """From a row of the output `usage`."""
        return cls(*map(int, counts))

    def row(self) -> list[int]:
        """As a row of the output `usage`."""
        return [self.prompt, self.completion, self.image, self.cached, self.text]


@dataclass(frozen=True, slots=True)
class Chunk:
    """More of an answer; tokens may come without text that is certain yet."""

    text: str
    tokens: int = 1
    logprob: float | None = None


@dataclass(frozen=True, slots=True)
class LastChunk:
    """The end of an answer, with what was held back until then."""

    text: str
    finish_reason: str
    usage: Usage


@dataclass(frozen=True, slots=True)
class StreamFailure:
    """The end of an answer that is not whole; `image` where one of them is why."""

    message: str
    code: int
    image: int | None = None


Event = Chunk | LastChunk | StreamFailure


def options_per_choice(asked: ChatRequest, *, tenant: str) -> list[dict[str, Any]]:
    """The tensor `options` of each choice, as values: what was not asked for is left out."""
    most = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    options = {
        "max_tokens": most,
        "min_tokens": asked.min_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": max(asked.top_k, 0) if asked.top_k is not None else None,
        "stop": list(asked.stop) or None,
        "ignore_eos": asked.ignore_eos or None,
        "logprobs": asked.logprobs or None,
    }
    asked_for = {name: value for name, value in options.items() if value is not None}
    given = options_with_tenant(asked_for, tenant=tenant)
    if asked.seed is None:
        return [given] * asked.choices
    return [given | {"seed": asked.seed + choice} for choice in range(asked.choices)]


def options_with_tenant(options: Mapping[str, Any], *, tenant: str) -> dict[str, Any]:
    """Options that say whose a chat is, whatever they said of it, and nothing of its urgency; no tenant is nobody's."""
    kept = {name: value for name, value in options.items() if name not in (_TENANT, _DEADLINE)}
    return kept | ({_TENANT: tenant} if tenant else {})


def options_with_deadline(options: bytes, left_seconds: float) -> bytes:
    """A row of the tensor `options` that says how soon its answer is due to begin, whatever it said of that.

    Args:
        options: as JSON; what is no JSON object is left as it is, for who reads it to refuse.
        left_seconds: from now until then; below 0 where that is past.
    """
    try:
        given = json.loads(options)
    except (ValueError, RecursionError):
        return options
    return json.dumps(given | {_DEADLINE: round(left_seconds, 6)}).encode() if isinstance(given, dict) else options


def message_values(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The tensor `messages`, as a value: words and places of images."""
    return [{"role": _role(message.role), "content": [*map(_part, message.content)]} for message in messages]


def _role(role: str) -> str:
    return "system" if role == "developer" else role


def _part(part: ContentPart) -> dict[str, str]:
    return {"type": "image"} if part.is_image else {"type": "text", "text": part.text or ""}


def chat_tensors(asked: ChatRequest, images: Sequence[bytes], options: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    """The inputs of a chat, a row for each of its choices; the rows share what is the same."""
    rows = len(options)
    messages = json.dumps(message_values(asked.messages), ensure_ascii=False, separators=(",", ":")).encode()
    inputs = {
        MESSAGES: bytes_tensor([messages] * rows),
        OPTIONS: bytes_tensor([json.dumps(each).encode() for each in options]),
    }
    if images:
        files = np.empty((rows, len(images)), dtype=object)
        for row in range(rows):
            files[row, :] = images
        inputs[IMAGES] = files
    return inputs


def responses_from_outputs(outputs: Mapping[str, Array]) -> list[LastChunk]:
    """The whole answer of each row."""
    return [
        LastChunk(text.decode(errors="replace"), reason.decode(errors="replace"), Usage.of(usage))
        for text, reason, usage in zip(outputs[TEXT], outputs[FINISH_REASON], outputs[USAGE], strict=True)
    ]


def outputs_from_response(text: str, last: LastChunk) -> dict[str, Array]:
    """The outputs of one row from its pieces."""
    return {
        TEXT: bytes_tensor([text.encode()]),
        FINISH_REASON: bytes_tensor([last.finish_reason.encode()]),
        USAGE: np.array([last.usage.row()], dtype=np.int64),
    }


def bytes_tensor(elements: Sequence[bytes]) -> Array:
    """A tensor of BYTES [elements]."""
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array


def content_id(encoder: str, file_digest: str, rows: int) -> str:
    """What an image is once it is encoded: equal where embeddings are equal.

    Args:
        encoder: what encodes, and with which weights.
        file_digest: SHA-256 of the image's file, in hex.
        rows: of its embeddings.
    """
    return f"{encoder}:{file_digest}:{rows}"


def encoder_of_content(content: str) -> str:
    """What encoded an image; empty where its content does not say."""
    return content.rsplit(":", 2)[0] if content.count(":") > 1 else ""


def embedding_id(name: str, row: int) -> str:
    """The name under which a replica keeps what it encodes of one row of a batch that came with the name."""
    return f"{name}-{row}"


def expand_embedding_ids(names: str) -> list[str]:
    """The names of several rows of one batch, which are written as ``KEEP-0,2,3``; or the one name that it is."""
    name, _, rows = names.rpartition("-")
    return [embedding_id(name, int(row)) for row in rows.split(",")] if _ROWS.fullmatch(rows) and name else [names]


def group_embedding_urls(urls: Sequence[str]) -> dict[str, list[int]]:
    """Where all that one batch left at one replica is pulled from at once, with the places of those in ``urls``."""
    batches: dict[str, list[tuple[str, int]]] = {}
    for place, url in enumerate(urls):
        kept = _EMBEDDING_ID.fullmatch(url)
        batches.setdefault(kept["batch"] if kept else url, []).append((kept["row"] if kept else "", place))
    return {
        f"{batch}-{','.join(row for row, _ in each)}" if each[0][0] else batch: [place for _, place in each]
        for batch, each in batches.items()
    }


def parse_event(kind: str, data: bytes) -> Event:
    """What one server-sent event says.

    Raises:
        ProtocolError: nothing that decision 41 knows.
    """
    try:
        told = json.loads(data)
        if kind == "error" or "error" in told:
            return StreamFailure(str(told["error"]), int(told.get("code", 500)), told.get("image"))
        if "finish_reason" in told:
            usage = told["usage"]
            counts = [usage[f"{name}_tokens"] for name in ("prompt", "completion", "image", "cached", "text")]
            return LastChunk(str(told["text"]), str(told["finish_reason"]), Usage.of(counts))
        return Chunk(str(told["text"]), int(told.get("tokens", 1)), told.get("logprob"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"an event that is none of an answer: {data[:200].decode(errors='replace')}") from error
