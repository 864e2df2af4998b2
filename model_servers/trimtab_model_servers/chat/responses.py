"""Responses of chat models: tensors and server-sent events."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from trimtab_model_servers.engine.request import Usage
from trimtab_protocol import Tensor

STREAM_TYPE: Final = "text/event-stream"


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token."""

    text: str
    logprob: float | None = None
    """None unless requested."""


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The end of a response, with the rest of its text."""

    text: str
    finish_reason: str
    usage: Usage
    text_tokens: int


def sse_event(event: TokenEvent | FinishEvent) -> bytes:
    if isinstance(event, TokenEvent):
        content: dict[str, object] = {"text": event.text, "tokens": 1}
        if event.logprob is not None:
            content["logprob"] = round(event.logprob, 6)
        return _data_line(content)
    return _data_line({"text": event.text, "finish_reason": event.finish_reason, "usage": usage_fields(event)})


def sse_error(code: int, message: str, image: int | None = None) -> bytes:
    """Serialize the last event of a failed response; ``image`` is the number of the image that caused the failure."""
    content: dict[str, object] = {"error": message, "code": code}
    return b"event: error\n" + _data_line(content if image is None else {**content, "image": image})


def usage_fields(event: FinishEvent) -> dict[str, int]:
    usage = event.usage
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "image_tokens": usage.image,
        "cached_tokens": usage.cached,
        "text_tokens": event.text_tokens,
    }


def response_tensors(responses: Sequence[tuple[str, FinishEvent]]) -> tuple[Tensor, ...]:
    """The tensors ``text``, ``finish_reason`` and ``usage`` (prompt, completion, image, cached, prompt text)."""
    usage = np.array([list(usage_fields(finish).values()) for _, finish in responses], dtype=np.int64)
    return (
        text_tensor("text", [text for text, _ in responses]),
        text_tensor("finish_reason", [finish.finish_reason for _, finish in responses]),
        Tensor("usage", "INT64", usage),
    )


def text_tensor(name: str, texts: Sequence[str]) -> Tensor:
    array = np.empty(len(texts), dtype=object)
    array[:] = [text.encode() for text in texts]
    return Tensor(name, "BYTES", array)


def _data_line(content: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
