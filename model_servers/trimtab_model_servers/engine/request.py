"""Requests to the engine and the events it answers with."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

PositionKeys = NDArray[np.int64]
"""One number per position: the token's id, or a negative hash of an image's content and the row within it."""

_ROW_BITS: Final = 20
"""Bits of an image's key that number its rows; the others hold the digest of its content."""


class RequestError(ValueError):
    """The request can never be served; the message names what would be valid. Other requests are not affected."""


class EngineBusy(RuntimeError):
    """The queue is full, or the engine stops."""


class FinishReason(StrEnum):
    """How a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters."""

    temperature: float = 0.0
    """0 is greedy; higher values flatten the distribution."""
    top_k: int = 0
    """Sample from the likeliest ``top_k`` tokens; 0 for all."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability reaches this, 0…1."""
    seed: int | None = None
    """Makes the output reproducible; None seeds each request anew."""


@dataclass(frozen=True, slots=True)
class Image:
    """One image of a request."""

    content: str
    """Digest of the image and its encoder; images with equal content have equal embeddings."""
    start: int
    """Position of its first placeholder in the prompt."""
    placeholders: int
    tokens: int
    """Tokens that the encoder makes of it; with cross-attention, more than its placeholders."""
    padding: int = 0
    """Rows after ``tokens`` that belong to empty tiles. With cross-attention, text before the first image attends to
    them, as in transformers' own model; no other text does."""
    segments: tuple[tuple[int, int], ...] = ()
    """(start, placeholders) of each segment, in order, if other tokens separate the placeholders (tile markers)."""

    @property
    def rows(self) -> int:
        return self.tokens + self.padding

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(start, placeholders) of each contiguous run of placeholders."""
        return self.segments or ((self.start, self.placeholders),)

    @property
    def end(self) -> int:
        """One past its last placeholder."""
        start, placeholders = self.runs[-1]
        return start + placeholders


@dataclass(frozen=True, slots=True)
class Request:
    """A generation request."""

    id: str
    """Unique among the requests in flight."""
    tokens: tuple[int, ...]
    """The prompt, with the placeholders of its images."""
    images: tuple[Image, ...] = ()
    """In the order of their positions."""
    max_new_tokens: int = 64
    min_new_tokens: int = 0
    """``end_ids`` are banned before this many tokens are generated."""
    end_ids: frozenset[int] = frozenset()
    """Tokens that end the generation; empty to generate ``max_new_tokens`` in any case."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end the generation; they are not part of the output."""
    sampling: Sampling = field(default_factory=Sampling)
    tenant: str = ""
    """Prefixes are shared only within a tenant."""
    due_at: float = 0.0
    """Deadline of the first token in seconds of the caller's clock; earlier deadlines are scheduled first."""

    def __post_init__(self) -> None:
        if not self.tokens:
            raise RequestError("the prompt is empty; should hold at least one token")
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {self.max_new_tokens}; should be 1 or more")
        if self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_new_tokens is {self.min_new_tokens}; should be at most max_new_tokens, {self.max_new_tokens}"
            )
        if any(not stop for stop in self.stop_strings):
            raise RequestError("a stop string is empty; should hold at least one character")
        end = 0
        for number, image in enumerate(self.images):
            if image.start < end or image.end > len(self.tokens) or image.placeholders < 1:
                raise RequestError(
                    f"image {number} has {image.placeholders} placeholders at {image.start}; should follow the image "
                    f"before it and lie within the prompt's {len(self.tokens)} tokens"
                )
            end = image.end
            _require_valid_segments(number, image)


def _require_valid_segments(number: int, image: Image) -> None:
    """Raise RequestError unless an image's segments are disjoint, in order, and hold all of its placeholders."""
    ends = [image.start, *(start + count for start, count in image.runs)]
    disjoint = all(count > 0 and start >= end for (start, count), end in zip(image.runs, ends, strict=False))
    if image.runs[0][0] != image.start or sum(count for _, count in image.runs) != image.placeholders or not disjoint:
        raise RequestError(
            f"image {number} has segments {list(image.segments)}; they should begin at {image.start}, be disjoint and "
            f"in order, and have {image.placeholders} placeholders together"
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request."""

    prompt: int
    completion: int
    image: int
    cached: int
    """Prompt tokens whose keys and values were reused."""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """One generated token."""

    request_id: str
    token: int
    log_probability: float
    text: str
    """Text released with the token; may be empty, or belong to earlier tokens."""


@dataclass(frozen=True, slots=True)
class RequestDone:
    """The last event of a request; each request has exactly one."""

    request_id: str
    finish_reason: FinishReason
    usage: Usage
    text: str = ""
    """Text that was withheld because a stop string could have begun in it."""
    error: str | None = None


def position_keys(tokens: Sequence[int], images: Sequence[Image]) -> PositionKeys:
    """Keys of a prompt's positions; equal keys mean equal model input."""
    keys = np.asarray(tokens, dtype=np.int64).copy()
    for image in images:
        digest = int.from_bytes(hashlib.sha256(image.content.encode()).digest()[:8], "big") >> 1
        base = digest >> _ROW_BITS << _ROW_BITS
        positions = np.concatenate([np.arange(start, start + count) for start, count in image.runs])
        keys[positions] = -1 - (base + np.arange(image.placeholders))
    return keys
