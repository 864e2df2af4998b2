"""Messages and options of a chat, parsed and validated."""

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from trimtab_model_servers.engine.request import Sampling
from trimtab_model_servers.errors import RefusalError, first_problem
from trimtab_protocol.chat.embedding_refs import ArrivedImage, EmbeddingRef, ImageIdentity, ShareRequest

MAX_STOP_STRINGS = 16
ROWS, WIDTH, CHECKSUM = "Trimtab-Rows", "Trimtab-Width", "Trimtab-Checksum"
"""Headers of a response that carries embeddings."""


class _RawMessage(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TextPart(_RawMessage):
    """Text of a message."""

    type: Literal["text"]
    text: str


class ImagePart(_RawMessage):
    """Placeholder of the next image."""

    type: Literal["image"]


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


def _as_parts(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Message(_RawMessage):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[tuple[Part, ...], BeforeValidator(_as_parts)]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def segments(self) -> tuple[str | None, ...]:
        """The parts in order: text, with adjacent parts joined, and None for each image."""
        segments: list[str | None] = []
        for is_text, parts in groupby(self.content, key=lambda part: isinstance(part, TextPart)):
            texts = [part.text if isinstance(part, TextPart) else None for part in parts]
            segments += ["".join(filter(None, texts))] if is_text else texts
        return tuple(segments)

    @property
    def image_count(self) -> int:
        return sum(isinstance(part, ImagePart) for part in self.content)


class Options(_RawMessage):
    """Request options of a chat."""

    max_tokens: int | None = Field(default=None, ge=1)
    """None for the model's default."""
    min_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=0.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    seed: int | None = None
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=(), max_length=MAX_STOP_STRINGS)
    ignore_eos: bool = False
    """Generate ``max_tokens`` in any case."""
    logprobs: bool = False
    tenant: str = Field(default="", max_length=256)
    """Ignored: routers of the previous version name the tenant here, and a client could."""
    deadline_seconds: float = 0.0
    """Seconds from arrival until the first token is due; the chat with the earliest deadline is scheduled first."""

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)


_MESSAGES: TypeAdapter[tuple[Message, ...]] = TypeAdapter(Annotated[tuple[Message, ...], Field(min_length=1)])
_OPTIONS: TypeAdapter[Options] = TypeAdapter(Options)
_REFERENCES: TypeAdapter[tuple[EmbeddingRef, ...]] = TypeAdapter(tuple[EmbeddingRef, ...])
_ARRIVED: TypeAdapter[tuple[ArrivedImage, ...]] = TypeAdapter(tuple[ArrivedImage, ...])
_SHARE_REQUEST: TypeAdapter[ShareRequest] = TypeAdapter(ShareRequest)
Parsed = TypeVar("Parsed")


def read_messages(text: bytes) -> tuple[Message, ...]:
    return _read("messages", _MESSAGES, text)


def read_options(text: bytes | None) -> Options:
    return Options() if text is None else _read("options", _OPTIONS, text)


def read_references(text: bytes | None) -> tuple[EmbeddingRef, ...]:
    return () if text is None else _read("references", _REFERENCES, text)


def read_arrived(text: bytes) -> tuple[ArrivedImage, ...]:
    return _read("references", _ARRIVED, text)


def read_share_request(text: bytes) -> str | ImageIdentity:
    return _read("of", _SHARE_REQUEST, text).of


def require_images(messages: Sequence[Message], count: int) -> None:
    """Raise RefusalError 400 unless there are as many images as the messages have placeholders."""
    placeholders = sum(message.image_count for message in messages)
    if placeholders != count:
        raise RefusalError(400, f"the messages refer to {placeholders} images, but {count} came; send one each")


def _read(name: str, adapter: "TypeAdapter[Parsed]", text: bytes) -> Parsed:
    """Parse JSON, which half a surrogate pair is not; raises RefusalError 400."""
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        problem = first_problem(error).replace("Invalid JSON", "not JSON", 1)
        raise RefusalError(400, f"{name}: {problem}") from error
