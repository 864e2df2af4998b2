"""Images that a stage encodes for another: how router, replicas and profiler tell each other of them. Pure.

Each key of these JSON objects is spelled here alone. What a replica tells may have keys more, of a later release; what
is asked of one may not, since a key that is misspelt would go unseen.
"""

from collections.abc import Iterable
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from trimtab_protocol.errors import ProtocolError

MAX_IMAGES = 4096
BLANK = "blank:"
"""Instead of where to pull an image from: it shows nothing. Profiles are measured with such images."""
PENDING = "pending:"
"""Instead of where to pull an image from: it is still encoded, and its reference comes once it is there."""
_EMBEDDING_URL = r"https?://[^/]+/v2/models/[^/]+/embeddings/[^/]+"
_Rows = Annotated[int, Field(ge=1)]
_Tokens = Annotated[int, Field(ge=0)]


class _WireModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    def json_bytes(self) -> bytes:
        """As it goes over the wire, without what it leaves at its default."""
        return self.model_dump_json(exclude_defaults=True).encode()


class EncodedImage(_WireModel):
    """What a replica keeps of an image.

    Attributes:
        rows: of embeddings.
        columns: of tiles that it was cut into, where a prompt tells; 0 where it was not cut, or none is told.
        digest: what it shows; empty where the replica does not say.
    """

    rows: _Rows
    columns: int = Field(default=0, ge=0)
    digest: str = Field(default="", max_length=256)


class EmbeddingRef(EncodedImage):
    """An image encoded elsewhere: where to pull it from, how many rows it will have, what it shows."""

    model_config = ConfigDict(extra="forbid")

    url: str = Field(pattern=rf"^({BLANK}|{PENDING}|{_EMBEDDING_URL})$")


class ArrivedImage(EmbeddingRef):
    """An image that was awaited, by its number in its chat."""

    image: int = Field(ge=0, lt=MAX_IMAGES)
    url: str = Field(pattern=rf"^{_EMBEDDING_URL}$")


class ImageIdentity(_WireModel):
    """An image by its file's SHA-256 (hex), its tenant, and whether it is alone in its chat."""

    model_config = ConfigDict(extra="forbid")

    file: str = Field(pattern=r"^[0-9a-f]{64}$")
    tenant: str = Field(default="", max_length=256)
    alone: bool = False


class ShareRequest(_WireModel):
    """What is to be kept under further names: what is kept under one already, or what is cached of an image."""

    model_config = ConfigDict(extra="forbid")

    of: str | ImageIdentity


class EmbeddingCounts(_WireModel):
    """How many rows the embeddings of each image would have, as a replica tells that encodes.

    Attributes:
        rows: of each image.
        columns: of tiles that each is cut into; None where a prompt tells of none.
    """

    rows: tuple[_Rows, ...]
    columns: tuple[_Tokens, ...] | None = None

    @model_validator(mode="after")
    def _require_same_length(self) -> Self:
        if self.columns and len(self.columns) != len(self.rows):
            raise ValueError(
                f"columns tells of {len(self.columns)} images, rows of {len(self.rows)}; tell both of each"
            )
        return self

    def blanks(self) -> tuple["EmbeddingRef", ...]:
        """Images of the same rows and columns that show nothing."""
        columns = self.columns or (0,) * len(self.rows)
        return tuple(
            blank_image(EncodedImage(rows=rows, columns=each)) for rows, each in zip(self.rows, columns, strict=True)
        )


class ChatTokenCounts(_WireModel):
    """What a chat would take, in tokens, as a replica tells that writes; those of images image by image."""

    prompt_tokens: _Tokens
    text_tokens: _Tokens
    image_tokens: tuple[_Tokens, ...]
    encoded_tokens: tuple[_Tokens, ...] = ()


_LISTS: TypeAdapter[tuple[EmbeddingRef, ...]] = TypeAdapter(tuple[EmbeddingRef, ...])
_ONE_OR_MORE: TypeAdapter[EmbeddingRef | tuple[EmbeddingRef, ...]] = TypeAdapter(
    EmbeddingRef | tuple[EmbeddingRef, ...]
)
_ARRIVED: TypeAdapter[tuple[ArrivedImage, ...]] = TypeAdapter(tuple[ArrivedImage, ...])


def blank_image(made: EncodedImage) -> EmbeddingRef:
    """An image of the same rows and columns that shows nothing."""
    return EmbeddingRef(url=BLANK, rows=made.rows, columns=made.columns)


def dump_refs(images: Iterable[EmbeddingRef]) -> bytes:
    """The images of a chat, as a row of the tensor `references`."""
    return _LISTS.dump_json(tuple(images), exclude_defaults=True)


def join_refs(images: Iterable[bytes]) -> bytes:
    """What `dump_refs` gives, of images that are written already."""
    return b"[" + b",".join(images) + b"]"


def dump_arrived(images: Iterable[ArrivedImage]) -> bytes:
    """Images that were awaited, as a replica is told of them."""
    return _ARRIVED.dump_json(tuple(images), exclude_defaults=True)


def parse_encoded_image(text: bytes) -> EncodedImage:
    """Read what a replica tells of an image that it keeps; raises ProtocolError."""
    try:
        return EncodedImage.model_validate_json(text)
    except ValidationError as error:
        raise _invalid_ref(text) from error


def parse_refs(text: bytes) -> tuple[EmbeddingRef, ...]:
    """Read a row of the tensor `references`, which is one image or a list of them; raises ProtocolError."""
    try:
        found = _ONE_OR_MORE.validate_json(text)
    except ValidationError as error:
        raise _invalid_ref(text) from error
    return found if isinstance(found, tuple) else (found,)


def _invalid_ref(text: bytes) -> ProtocolError:
    return ProtocolError(f"a reference that is none of an encoded image: {text[:200].decode(errors='replace')}")
