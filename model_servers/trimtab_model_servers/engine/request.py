"""What is asked of the engine and what it answers. Pure."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

PositionKeys = NDArray[np.int64]
"""One number a position tells what stands there: a token's id, or below zero a piece of an image by its content."""

_PIECE_BITS: Final = 20
"""An image holds at most this many bits' worth of tokens; the rest of a key is its content's digest."""


class RequestError(ValueError):
    """A request that can never be served; the message says what would be right. Nobody else notices it."""


class EngineBusy(RuntimeError):
    """As many requests wait already as may."""


class FinishReason(StrEnum):
    """How a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: 0 takes the likeliest token; higher is more even.
        top_k: draw among this many likeliest; 0 for all.
        top_p: draw among the likeliest that hold this share together, 0…1.
        seed: makes the draw repeatable; None draws anew each time.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise RequestError(f"temperature is {self.temperature}; should be 0 to 100")
        if self.top_k < 0:
            raise RequestError(f"top_k is {self.top_k}; should be 0 (all) or more")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}; should be above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class Image:
    """One image of a request.

    Attributes:
        content: a digest of what it shows and of what encoded it; equal means equal embeddings.
        start: its first placeholder's position in the prompt.
        placeholders: how many positions of the prompt it takes.
        tokens: how many tokens the encoder makes of it; for a model that attends across more than the placeholders.
        padding: how many more behind those are of tiles that show nothing. A model that attends across lets text before
            the first image see them, as transformers' own does; nothing else does.
        pieces: (start, placeholders) of each, in order, where other tokens of the prompt stand between its
            placeholders (rows and columns of tiles); empty where they stand side by side.
    """

    content: str
    start: int
    placeholders: int
    tokens: int
    padding: int = 0
    pieces: tuple[tuple[int, int], ...] = ()

    @property
    def rows(self) -> int:
        """Rows of its embeddings."""
        return self.tokens + self.padding

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(start, placeholders) of each run of its placeholders."""
        return self.pieces or ((self.start, self.placeholders),)

    @property
    def end(self) -> int:
        """One beyond its last placeholder."""
        start, placeholders = self.runs[-1]
        return start + placeholders


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked.

    Attributes:
        id: its name, used by no other request in flight.
        tokens: the prompt's ids, images' placeholders among them.
        images: in the order of their places.
        max_new_tokens: most tokens written.
        min_new_tokens: the end is not drawn before as many.
        end_ids: tokens that end an answer; none to write ``max_new_tokens`` in any case.
        stops: strings that end an answer; neither they nor what follows is told.
        sampling: how tokens are drawn.
        tenant: prefixes are shared within one only.
        due_at: when the answer is due to begin, in seconds of the caller's clock: who is due first goes first. So who
            waits goes before more and more of those that come.
    """

    id: str
    tokens: tuple[int, ...]
    images: tuple[Image, ...] = ()
    max_new_tokens: int = 64
    min_new_tokens: int = 0
    end_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    tenant: str = ""
    due_at: float = 0.0

    def __post_init__(self) -> None:
        if not self.tokens:
            raise RequestError("the prompt is empty; should hold at least one token")
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {self.max_new_tokens}; should be 1 or more")
        if self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_new_tokens is {self.min_new_tokens}; should be at most max_new_tokens, {self.max_new_tokens}"
            )
        if any(not stop for stop in self.stops):
            raise RequestError("a stop string is empty; should hold at least one character")
        past = 0
        for number, image in enumerate(self.images):
            if image.start < past or image.end > len(self.tokens) or image.placeholders < 1:
                raise RequestError(
                    f"image {number} stands at {image.start} for {image.placeholders}; should follow the one before it "
                    f"and lie within the prompt's {len(self.tokens)} tokens"
                )
            past = image.end
            _require_whole(number, image)


def _require_whole(number: int, image: Image) -> None:
    """Raise RequestError unless an image's pieces follow one another and are all of its placeholders."""
    ends = [image.start, *(start + count for start, count in image.runs)]
    apart = all(count > 0 and start >= end for (start, count), end in zip(image.runs, ends, strict=False))
    if image.runs[0][0] != image.start or sum(count for _, count in image.runs) != image.placeholders or not apart:
        raise RequestError(
            f"image {number} stands in pieces {list(image.pieces)}; they should begin at {image.start}, follow one "
            f"another and have {image.placeholders} placeholders together"
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request took, in tokens. ``cached`` of the prompt were not computed again."""

    prompt: int
    completion: int
    image: int
    cached: int


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """One token written, and the text that is certain by now (it may be empty, or of earlier tokens)."""

    request_id: str
    token: int
    log_probability: float
    text: str


@dataclass(frozen=True, slots=True)
class RequestDone:
    """A request's last word; there is exactly one for each.

    Attributes:
        request_id: whose.
        ending: how it ended.
        usage: what it took.
        text: what was held back until it was certain that no stop string begins with it.
        error: why, where it ended in error.
    """

    request_id: str
    ending: FinishReason
    usage: Usage
    text: str = ""
    error: str | None = None


def position_keys(tokens: Sequence[int], images: Sequence[Image]) -> PositionKeys:
    """Tell what stands at each position, so that equal keys mean equal input."""
    keys = np.asarray(tokens, dtype=np.int64).copy()
    for image in images:
        digest = int.from_bytes(hashlib.sha256(image.content.encode()).digest()[:8], "big") >> 1
        base = digest >> _PIECE_BITS << _PIECE_BITS
        places = np.concatenate([np.arange(start, start + count) for start, count in image.runs])
        keys[places] = -1 - (base + np.arange(image.placeholders))
    return keys
