"""A chat as it is asked: messages, options, and what they must be. Pure."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from trimtab_model_servers.engine.request import Sampling
from trimtab_model_servers.errors import RefusalError
from trimtab_protocol.chat.embedding_refs import ArrivedImage, EmbeddingRef, Identity, ShareRequest

MOST_STOPS = 16


class _RawMessage(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TextPart(_RawMessage):
    """Words."""

    type: Literal["text"]
    text: str


class ImagePart(_RawMessage):
    """The place of the next image."""

    type: Literal["image"]


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


def _as_parts(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Message(_RawMessage):
    """One turn."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[tuple[Part, ...], BeforeValidator(_as_parts)]

    @property
    def text(self) -> str:
        """Its words, joined."""
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def spoken(self) -> tuple[str | None, ...]:
        """Its parts in their order: words, joined where no image stands between them; None where an image stands."""
        said: list[str | None] = []
        for part in self.content:
            words = part.text if isinstance(part, TextPart) else None
            if words is not None and said and (before := said[-1]) is not None:
                said[-1] = before + words
            else:
                said.append(words)
        return tuple(said)

    @property
    def images(self) -> int:
        """How many images stand in it."""
        return sum(isinstance(part, ImagePart) for part in self.content)


class Options(_RawMessage):
    """How to answer.

    Attributes:
        max_tokens: most tokens written; None as many as the model's setting says.
        ignore_eos: write ``max_tokens`` in any case.
        logprobs: tell each token's log-probability.
        tenant: nothing is shared with another.
        urgency_seconds: within which the answer is due to begin, from when the chat comes; who is due first goes first.
    """

    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=0.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    seed: int | None = None
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=(), max_length=MOST_STOPS)
    ignore_eos: bool = False
    logprobs: bool = False
    tenant: str = Field(default="", max_length=256)
    urgency_seconds: float = 0.0

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)


_MESSAGES: TypeAdapter[tuple[Message, ...]] = TypeAdapter(Annotated[tuple[Message, ...], Field(min_length=1)])
_OPTIONS: TypeAdapter[Options] = TypeAdapter(Options)
_REFERENCES: TypeAdapter[tuple[EmbeddingRef, ...]] = TypeAdapter(tuple[EmbeddingRef, ...])
_ARRIVED: TypeAdapter[tuple[ArrivedImage, ...]] = TypeAdapter(tuple[ArrivedImage, ...])
_SHARED: TypeAdapter[ShareRequest] = TypeAdapter(ShareRequest)
Read = TypeVar("Read")


def read_messages(text: bytes) -> tuple[Message, ...]:
    """Read the tensor ``messages``; raises RefusalError 400 naming what is wrong."""
    return _read("messages", _MESSAGES, text)


def read_options(text: bytes | None) -> Options:
    """Read the tensor ``options``, absent or not; raises RefusalError 400 naming what is wrong."""
    return Options() if text is None else _read("options", _OPTIONS, text)


def read_references(text: bytes | None) -> tuple[EmbeddingRef, ...]:
    """Read the tensor ``references``, absent or not; raises RefusalError 400 naming what is wrong."""
    return () if text is None else _read("references", _REFERENCES, text)


def read_arrived(text: bytes) -> tuple[ArrivedImage, ...]:
    """Read what is told of images that were awaited; raises RefusalError 400 naming what is wrong."""
    return _read("references", _ARRIVED, text)


def read_shared(text: bytes) -> str | Identity:
    """Read what is to be kept under further names; raises RefusalError 400 naming what is wrong."""
    return _read("of", _SHARED, text).of


def require_images(messages: Sequence[Message], given: int) -> None:
    """Raise RefusalError 400 unless as many images came as the messages have places for."""
    places = sum(message.images for message in messages)
    if places != given:
        raise RefusalError(400, f"the messages have places for {places} images, but {given} came; send one each")


def _read(name: str, adapter: "TypeAdapter[Read]", text: bytes) -> Read:
    try:
        written: Any = json.loads(text)
        return adapter.validate_python(written)
    except (ValueError, RecursionError) as error:
        raise RefusalError(400, f"{name}: {_problem(error)}") from error


def _problem(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return f"not JSON: {error}"
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])
