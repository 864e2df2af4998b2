"""Settings and components of chat models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from trimtab_model_servers.chat.interfaces import ChatTokenizer, VisionEncoder
from trimtab_model_servers.engine.model_adapters import ModelAdapter


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
    """Further model metadata."""
