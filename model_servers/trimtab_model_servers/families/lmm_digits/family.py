"""Families `lmm-digits/{colocated,encode,text}`: small multimodal models, with or without their encoder.

Weight files hold the architecture and the tokenizer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow
from pydantic import Field
from tokenizers import Tokenizer
from torch import Tensor

from trimtab_model_servers.chat.image_decoder import decode_image
from trimtab_model_servers.chat.interfaces import (
    ChatComponents,
    ChatParameters,
    EmbeddingShape,
    ImageSpan,
    Prompt,
    encode_text,
)
from trimtab_model_servers.chat.messages import Message
from trimtab_model_servers.engine.model_adapters import adapt_model
from trimtab_model_servers.errors import RefusalError
from trimtab_model_servers.families.digits import PAGE_SIDE_PX
from trimtab_model_servers.families.interfaces import read_parameters
from trimtab_model_servers.families.lmm_digits import models
from trimtab_model_servers.families.lmm_digits.models import END_ID, PAGE_TOKENS, WIDTH, Architecture
from trimtab_model_servers.families.lmm_digits.tokenizer import ASSISTANT, END, IMAGE, REGISTERS, USER, special_id
from trimtab_model_servers.weights.source import RandomSeed, find_weights
from trimtab_pipelines.image_tokens import ImageTokens, OneTile
from trimtab_pipelines.model_spec import ModelSpec


class PageChatParameters(ChatParameters):
    """Settings of the family."""

    architecture: Architecture = Field(
        default="decoder-only", description="Architecture of random weights; weight files state theirs."
    )


class PageEncoder:
    """Decodes pages and encodes them with the vision tower."""

    width = WIDTH
    pixel_bytes = 1
    token_rule = OneTile(PAGE_TOKENS)

    def __init__(self, model: Any, name: str) -> None:
        self.name = name
        self._tower = models.tower(model)
        self._projector = model.model.multi_modal_projector

    def embedding_shape(self, count: ImageTokens) -> EmbeddingShape:
        return EmbeddingShape(count.encoded, 0)

    def preprocess(self, file: bytes, images: int) -> Tensor:
        """Decode a page as grey and resize it: uint8 [1, 96, 96]."""
        del images
        grey = decode_image(file, "L")
        if grey.size != (PAGE_SIDE_PX, PAGE_SIDE_PX):
            grey = grey.resize((PAGE_SIDE_PX, PAGE_SIDE_PX), Pillow.Resampling.BILINEAR)
        return torch.from_numpy(np.array(grey, dtype=np.uint8)[None])

    def encode(self, pixels: Sequence[Tensor]) -> list[Tensor]:
        """Encode pages, [16, width] each."""
        return list(self._projector(self._tower(torch.stack(list(pixels))).last_hidden_state))


class QuestionTemplate:
    """Chat template of lmm-digits: the pages of a turn, then its text."""

    end_ids = frozenset({END_ID})

    def __init__(self, tokenizer: Tokenizer, architecture: Architecture) -> None:
        self.tokenizer = tokenizer
        self._placeholders = models.placeholders(architecture)
        page = [special_id(tokenizer, IMAGE)] * self._placeholders
        self._page = page + [special_id(tokenizer, register) for register in REGISTERS]
        self._user, self._assistant, self._end = (special_id(tokenizer, token) for token in (USER, ASSISTANT, END))

    def build_prompt(self, messages: Sequence[Message], shapes: Sequence[EmbeddingShape]) -> Prompt:
        """Encode a chat, turn by turn; system text precedes the next user's; raises RefusalError 400."""
        if any(shape.total != PAGE_TOKENS for shape in shapes):
            raise RefusalError(400, f"images have {[shape.total for shape in shapes]} rows; a page has {PAGE_TOKENS}")
        if messages[-1].role == "assistant":
            raise RefusalError(400, "messages: the last message is the assistant's; it must be the user's")
        tokens: list[int] = []
        spans: list[ImageSpan] = []
        for message in messages:
            self._append(message, tokens, spans)
        return Prompt((*tokens, self._assistant), tuple(spans))

    def _append(self, message: Message, tokens: list[int], spans: list[ImageSpan]) -> None:
        is_assistant = message.role == "assistant"
        if is_assistant and message.image_count:
            raise RefusalError(400, "messages: an assistant's message has an image; only a user's may")
        if any(text and text.strip() for text in _between_pages(message)):
            raise RefusalError(400, "messages: text between two images; it must precede the first or follow the last")
        tokens.append(self._assistant if is_assistant else self._user)
        for _ in range(message.image_count):
            spans.append(ImageSpan(len(tokens), self._placeholders))
            tokens += self._page
        tokens += encode_text(self.tokenizer, message.text)
        if is_assistant:
            tokens.append(self._end)


def _between_pages(message: Message) -> Sequence[str | None]:
    """Segments of a turn from its first page to its last."""
    segments = message.segments
    pages = [index for index, segment in enumerate(segments) if segment is None]
    return segments[pages[0] : pages[-1]] if pages else ()


def build(spec: ModelSpec) -> ChatComponents:
    parameters = read_parameters(PageChatParameters, spec)
    weights = find_weights(spec.storage_uri, spec.digest)
    loaded = (
        models.random_model(weights.value, parameters.architecture)
        if isinstance(weights, RandomSeed)
        else models.load(weights)
    )
    role = spec.family.rpartition("/")[2]
    generates, encodes = role in {"colocated", "text"}, role in {"colocated", "encode"}
    return ChatComponents(
        "random" if isinstance(weights, RandomSeed) else "stored",
        parameters,
        QuestionTemplate(loaded.tokenizer, loaded.architecture) if generates else None,
        adapt_model(loaded.model) if generates else None,
        PageEncoder(loaded.model, loaded.name) if encodes else None,
        {"architecture": loaded.architecture},
    )
