"""Answers as tensors and as server-sent events. Pure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from trimtab_model_servers.engine.request import RequestDone, TokenChunk, Usage
from trimtab_protocol import Tensor

STREAM_TYPE: Final = "text/event-stream"


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A piece of an answer; ``logprob`` of its token, where it was asked for."""

    text: str
    logprob: float | None = None


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """How an answer ended, with what was held back until then."""

    text: str
    finish_reason: str
    usage: Usage
    text_tokens: int


def chunk_event(event: TokenChunk, *, logprobs: bool) -> TokenEvent:
    """A piece of the engine's as callers get it."""
    return TokenEvent(event.text, event.log_probability if logprobs else None)


def last_of(event: RequestDone, text_tokens: int) -> FinishEvent:
    """The engine's last word as callers get it."""
    return FinishEvent(event.text, event.ending.value, event.usage, text_tokens)


def line(said: TokenEvent | FinishEvent) -> bytes:
    """One server-sent event."""
    if isinstance(said, TokenEvent):
        content: dict[str, object] = {"text": said.text, "tokens": 1}
        if said.logprob is not None:
            content["logprob"] = round(said.logprob, 6)
        return _event(content)
    return _event({"text": said.text, "finish_reason": said.finish_reason, "usage": usage_of(said)})


def error_line(code: int, message: str, image: int | None = None) -> bytes:
    """The last event of an answer that failed; ``image`` where one of them is why."""
    content: dict[str, object] = {"error": message, "code": code}
    return b"event: error\n" + _event(content if image is None else {**content, "image": image})


def usage_of(said: FinishEvent) -> dict[str, int]:
    """What an answer took, in tokens."""
    usage = said.usage
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "image_tokens": usage.image,
        "cached_tokens": usage.cached,
        "text_tokens": said.text_tokens,
    }


def tensors_of(answers: Sequence[tuple[str, FinishEvent]]) -> tuple[Tensor, ...]:
    """Rows of ``text``, ``finish_reason`` and ``usage`` (prompt, completion, image, cached, text of the prompt)."""
    usage = np.array([list(usage_of(last).values()) for _, last in answers], dtype=np.int64)
    return (
        text_tensor("text", [text for text, _ in answers]),
        text_tensor("finish_reason", [last.finish_reason for _, last in answers]),
        Tensor("usage", "INT64", usage),
    )


def text_tensor(name: str, texts: Sequence[str]) -> Tensor:
    """A BYTES tensor of one text a row."""
    array = np.empty(len(texts), dtype=object)
    array[:] = [text.encode() for text in texts]
    return Tensor(name, "BYTES", array)


def _event(content: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
