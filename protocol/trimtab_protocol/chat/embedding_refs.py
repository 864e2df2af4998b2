"""Embedding references: messages about encoded images between router, replicas and profiler.

Messages of replicas may have additional keys of a later release; requests may not, so that a misspelt key is an error.
"""

from collections.abc import Iterable
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from trimtab_protocol.errors import ProtocolError

MAX_IMAGES = 4096
BLANK = "blank:"
"""URL of a blank image, with which profiles are measured."""
PENDING = "pending:"
"""URL of an image that is still being encoded; its reference follows."""
_EMBEDDING_URL = r"https?://[^/]+/v2/models/[^/]+/embeddings/[^/]+"
_Rows = Annotated[int, Field(ge=1)]
_Tokens = Annotated[int, Field(ge=0)]


class _WireModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    def json_bytes(self) -> bytes:
        """JSON without default values."""
        return self.model_dump_json(exclude_defaults=True).encode()


class EncodedImage(_WireModel):
    """A stored embedding."""

    rows: _Rows
    """Rows of the embedding."""
    columns: int = Field(default=0, ge=0)
    """Columns of tiles that the image was cut into, if the prompt depends on them; 0 otherwise."""
    digest: str = Field(default="", max_length=256)
    """Identifies the content; empty if the replica does not report it."""


class EmbeddingRef(EncodedImage):
    """Reference to an embedding: where to pull it from, its size and content."""

    model_config = ConfigDict(extra="forbid")

    url: str = Field(pattern=rf"^({BLANK}|{PENDING}|{_EMBEDDING_URL})$")


class ArrivedImage(EmbeddingRef):
    """A pending image that was encoded, by its index in the chat."""

    image: int = Field(ge=0, lt=MAX_IMAGES)
    url: str = Field(pattern=rf"^{_EMBEDDING_URL}$")


class ImageIdentity(_WireModel):
    """An image by its file's SHA-256 (hex), its tenant, and whether it is alone in its chat."""

    model_config = ConfigDict(extra="forbid")

    file: str = Field(pattern=r"^[0-9a-f]{64}$")
    tenant: str = Field(default="", max_length=256)
    alone: bool = False


class ShareRequest(_WireModel):
    """Request to store an embedding under further names: one stored under a name, or one cached of an image."""

    model_config = ConfigDict(extra="forbid")

    of: str | ImageIdentity


class EmbeddingCounts(_WireModel):
    """Sizes of the embeddings that images would have, as an encoder reports them."""

    rows: tuple[_Rows, ...]
    """Of each image."""
    columns: tuple[_Tokens, ...] | None = None
    """Columns of tiles of each image; None if prompts do not depend on them."""

    @model_validator(mode="after")
    def _require_same_length(self) -> Self:
        if self.columns and len(self.columns) != len(self.rows):
            raise ValueError(
                f"columns has {len(self.columns)} images, rows has {len(self.rows)}; both must have the same length"
            )
        return self

    def blanks(self) -> tuple["EmbeddingRef", ...]:
        columns = self.columns or (0,) * len(self.rows)
        return tuple(
            blank_image(EncodedImage(rows=count, columns=tiles))
            for count, tiles in zip(self.rows, columns, strict=True)
        )


class ChatTokenCounts(_WireModel):
    """Token counts that a chat would have, as a generation replica reports them; image tokens by image."""

    prompt_tokens: _Tokens
    text_tokens: _Tokens
    image_tokens: tuple[_Tokens, ...]
    encoded_tokens: tuple[_Tokens, ...] = ()


_ONE_OR_MORE: TypeAdapter[EmbeddingRef | tuple[EmbeddingRef, ...]] = TypeAdapter(
    EmbeddingRef | tuple[EmbeddingRef, ...]
)


def blank_image(image: EncodedImage) -> EmbeddingRef:
    return EmbeddingRef(url=BLANK, rows=image.rows, columns=image.columns)


def dump_refs(images: Iterable[EmbeddingRef]) -> bytes:
    return join_refs(image.json_bytes() for image in images)


def join_refs(images: Iterable[bytes]) -> bytes:
    return b"[" + b",".join(images) + b"]"


def parse_encoded_image(text: bytes) -> EncodedImage:
    """Parse a replica's report of a stored embedding; raises ProtocolError."""
    try:
        return EncodedImage.model_validate_json(text)
    except ValidationError as error:
        raise _invalid_ref(text) from error


def parse_refs(text: bytes) -> tuple[EmbeddingRef, ...]:
    """Parse a row of the tensor `references`, one image or a list; raises ProtocolError."""
    try:
        refs = _ONE_OR_MORE.validate_json(text)
    except ValidationError as error:
        raise _invalid_ref(text) from error
    return refs if isinstance(refs, tuple) else (refs,)


def _invalid_ref(text: bytes) -> ProtocolError:
    return ProtocolError(f"invalid embedding reference: {text[:200].decode(errors='replace')}")
