"""What a family builds for chats, and how much of it one replica holds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from trimtab_model_servers.chat.interfaces import ChatTokenizer, VisionEncoder
from trimtab_model_servers.engine.model_adapters import ModelAdapter

Stage = Literal["whole", "encode", "text"]


class ChatParameters(BaseModel):
    """Settings of every family that chats; an encoder reads its own among them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slots: int = Field(default=16, ge=1, le=256, description="Answers written at once")
    slot_tokens: int = Field(default=512, ge=16, description="Most tokens of a prompt and its answer together")
    step_tokens: int = Field(default=256, ge=2, description="Most tokens a step computes; above slots")
    waiting: int = Field(default=1024, ge=1, description="Chats that may wait for a slot")
    max_new_tokens: int = Field(default=64, ge=1, description="Tokens written where a chat does not say how many")
    image_tokens: int = Field(default=256, ge=0, description="Most image tokens of a chat whose model attends across")
    batch_images: int = Field(default=8, ge=1, le=256, description="Images encoded at once")
    cache_bytes: int = Field(default=64 * 2**20, ge=0, description="Embeddings kept for the same image sent again")
    kept_bytes: int = Field(default=256 * 2**20, ge=0, description="Embeddings that may wait to be pulled")


@dataclass(frozen=True, slots=True)
class ChatComponents:
    """The parts of a model that a stage of chats needs: all of them, the encoder, or what writes."""

    weights: Literal["stored", "random"]
    parameters: ChatParameters
    writing: ChatTokenizer | None
    network: ModelAdapter | None
    seeing: VisionEncoder | None
    facts: Mapping[str, bool | int | float | str] = field(default_factory=dict)
