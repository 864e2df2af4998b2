"""Interfaces, settings and components of a chat family."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer
from torch import Tensor

from trimtab_model_servers.chat.messages import Message
from trimtab_model_servers.engine.model_adapters import ModelAdapter
from trimtab_pipelines.image_tokens import ImageTokenRule, ImageTokens

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # texts come one by one; a pool of threads would idle


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The placeholders of an image in a prompt."""

    start: int
    placeholders: int
    segments: tuple[tuple[int, int], ...] = ()
    """(start, placeholders) of each segment if markers separate the placeholders."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageEmbedding:
    """An image's embeddings."""

    rows: Tensor
    """[rows, width]"""
    digest: str
    """Identity of image and encoder."""
    columns: int = 0
    """Columns of the image's tile grid; 0 if the model does not mark tiles."""

    @property
    def data(self) -> memoryview:
        """The bytes of the rows, without a copy if they are contiguous."""
        return self.rows.contiguous().view(torch.uint8).numpy().reshape(-1).data


@dataclass(frozen=True, slots=True)
class EmbeddingShape:
    """The rows of an image's embeddings."""

    total: int
    padding: int = 0
    """Trailing rows that belong to empty tiles."""
    columns: int = 0
    """Columns of the image's tile grid, if the prompt marks rows and columns; else 0."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized chat and the spans of its images, in order."""

    tokens: tuple[int, ...]
    image_spans: tuple[ImageSpan, ...]

    @property
    def text_tokens(self) -> int:
        """Tokens that are not placeholders."""
        return len(self.tokens) - sum(span.placeholders for span in self.image_spans)


class ChatTokenizer(Protocol):
    """Tokenizes chats for a model."""

    end_ids: frozenset[int]
    tokenizer: Tokenizer

    def build_prompt(self, messages: Sequence[Message], shapes: Sequence[EmbeddingShape]) -> Prompt:
        """Tokenize a chat up to the assistant's turn; its images have embeddings of ``shapes``.

        Text of callers never becomes a placeholder or another special token. Raises RefusalError 400 if the chat
        template does not support the messages, or no image has such a shape.
        """


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a text, without special ones. Other threads run meanwhile, which ``Tokenizer.encode`` prevents."""
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


class VisionEncoder(Protocol):
    """Encodes images for a model."""

    @property
    def token_rule(self) -> ImageTokenRule:
        """Number of tokens of an image by its size."""

    @property
    def width(self) -> int:
        """Numbers per embedding row."""

    @property
    def name(self) -> str:
        """Identity of encoder and weights: encoders with the same name give equal embeddings of an image."""

    @property
    def pixel_bytes(self) -> int:
        """Peak memory of ``preprocess`` per pixel of a decoded image."""

    def embedding_shape(self, count: ImageTokens) -> EmbeddingShape:
        """Shape of the embeddings of an image with ``count`` tokens."""

    def preprocess(self, file: bytes, images: int) -> Any:
        """Preprocess a file of a chat of ``images`` images, on any thread; RefusalError 422 if it is none."""

    def encode(self, pixels: Sequence[Any]) -> list[Tensor]:
        """Encode preprocessed images, [rows, width] each. Called in inference mode, by one thread at a time."""


class ChatParameters(BaseModel):
    """Settings of every chat family; encoders use some of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slots: int = Field(default=16, ge=1, le=256, description="Concurrent generations")
    slot_tokens: int = Field(default=512, ge=16, description="Maximum tokens of a prompt and its output together")
    step_tokens: int = Field(default=256, ge=2, description="Token budget of an engine step; above slots")
    max_waiting: int = Field(default=1024, ge=1, description="Maximum chats that wait for a slot")
    max_new_tokens: int = Field(default=64, ge=1, description="Maximum tokens generated for chats without max_tokens")
    image_tokens: int = Field(default=256, ge=0, description="Maximum image tokens of a chat, with cross-attention")
    batch_images: int = Field(default=8, ge=1, le=256, description="Maximum images encoded in a batch")
    cache_bytes: int = Field(default=64 * 2**20, ge=0, description="Size of the embedding cache")
    store_bytes: int = Field(default=256 * 2**20, ge=0, description="Maximum embeddings stored for other replicas")


@dataclass(frozen=True, slots=True)
class ChatComponents:
    """The parts of a model that a stage needs: the encoder, the generator (tokenizer and adapter), or all."""

    weights: Literal["stored", "random"]
    parameters: ChatParameters
    tokenizer: ChatTokenizer | None
    adapter: ModelAdapter | None
    encoder: VisionEncoder | None
    facts: Mapping[str, bool | int | float | str] = field(default_factory=dict)
