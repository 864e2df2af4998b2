"""The lmm-digits pipeline's own small multimodal models: whole, or parted into what encodes and what writes.

Which of the two architectures it is stands in the weights; the tokenizer stands there too.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow
from pydantic import Field
from tokenizers import Tokenizer
from torch import Tensor

from trimtab_model_servers.chat.config import ChatComponents, ChatParameters
from trimtab_model_servers.chat.image_decoder import decode_image
from trimtab_model_servers.chat.interfaces import ImageSpan, Prompt, Rows
from trimtab_model_servers.chat.messages import Message
from trimtab_model_servers.engine.model_adapters import adapt_model
from trimtab_model_servers.errors import ModelError, RefusalError
from trimtab_model_servers.families.digits import PAGE_SIDE_PX
from trimtab_model_servers.families.lmm_digits import models
from trimtab_model_servers.families.lmm_digits.models import END_ID, WIDTH, Architecture
from trimtab_model_servers.families.lmm_digits.tokenizer import ASSISTANT, END, IMAGE, REGISTERS, USER, special_id
from trimtab_model_servers.families.lmm_digits.vision_tower import PAGE_TOKENS
from trimtab_model_servers.families.parameters import read_parameters
from trimtab_model_servers.weights_source import RandomSeed, find_weights
from trimtab_pipelines.image_tokens import ImageTokens, OneTile
from trimtab_pipelines.model_spec import ModelSpec


class PageChatParameters(ChatParameters):
    """Settings of the family."""

    architecture: Architecture = Field(default="decoder-only", description="Of random weights; stored ones say it")


class PageReader:
    """Opens pages and encodes them."""

    width = WIDTH
    rule = OneTile(PAGE_TOKENS)

    def __init__(self, model: Any, name: str) -> None:
        self.name = name
        self._tower = models.tower(model)
        self._projector = model.model.multi_modal_projector

    def rows(self, count: ImageTokens) -> Rows:
        """Every page's tokens."""
        return Rows(count.encoded, 0)

    def pixels(self, file: bytes, images: int) -> Tensor:
        """Open a page, grey, as large as the tower takes it: uint8 [1, 96, 96]."""
        del images
        grey = decode_image(file, "L")
        if grey.size != (PAGE_SIDE_PX, PAGE_SIDE_PX):
            grey = grey.resize((PAGE_SIDE_PX, PAGE_SIDE_PX), Pillow.Resampling.BILINEAR)
        return torch.from_numpy(np.array(grey, dtype=np.uint8)[None])

    def encode(self, pixels: Sequence[Tensor]) -> list[Tensor]:
        """Encode pages, [16, width] each."""
        return list(self._projector(self._tower(torch.stack(list(pixels))).last_hidden_state))


class Questions:
    """Spells chats as the models learned them: the user's pages, then what is asked."""

    end_ids = frozenset({END_ID})

    def __init__(self, tokenizer: Tokenizer, architecture: Architecture) -> None:
        self.tokenizer = tokenizer
        self._placeholders = models.placeholders(architecture)
        page = [special_id(tokenizer, IMAGE)] * self._placeholders
        self._page = page + [special_id(tokenizer, register) for register in REGISTERS]
        self._user, self._assistant, self._end = (special_id(tokenizer, token) for token in (USER, ASSISTANT, END))

    def prompt(self, messages: Sequence[Message], rows: Sequence[Rows]) -> Prompt:
        """Spell a chat, turn by turn; a system's words stand before the next user's.

        Raises:
            RefusalError: 400, the assistant is shown an image or has the last word already, or words stand between
                pages: the models learned all pages first, so that what such words are about would be lost.
        """
        if any(each.total != PAGE_TOKENS for each in rows):
            raise RefusalError(400, f"images of {[each.total for each in rows]} rows came; each page has {PAGE_TOKENS}")
        if messages[-1].role == "assistant":
            raise RefusalError(400, "messages: the last one is the assistant's; should be the user's")
        tokens: list[int] = []
        places: list[ImageSpan] = []
        for message in messages:
            self._add(message, tokens, places)
        return Prompt((*tokens, self._assistant), tuple(places))

    def _add(self, message: Message, tokens: list[int], places: list[ImageSpan]) -> None:
        spoken = message.role == "assistant"
        if spoken and message.images:
            raise RefusalError(400, "messages: an image in the assistant's message; should be in the user's")
        if any(words and words.strip() for words in _between_pages(message)):
            raise RefusalError(400, "messages: words between two images; should be before the first or after the last")
        tokens.append(self._assistant if spoken else self._user)
        for _ in range(message.images):
            places.append(ImageSpan(len(tokens), self._placeholders))
            tokens += self._page
        tokens += self.tokenizer.encode(message.text, add_special_tokens=False).ids
        if spoken:
            tokens.append(self._end)


def _between_pages(message: Message) -> Sequence[str | None]:
    """A turn's parts from its first page to its last."""
    parts = message.spoken
    pages = [number for number, part in enumerate(parts) if part is None]
    return parts[pages[0] : pages[-1]] if pages else ()


def build(spec: ModelSpec) -> ChatComponents:
    """Build the part that the family's name ends in."""
    parameters = read_parameters(PageChatParameters, spec)
    weights = find_weights(spec.storage_uri, spec.digest)
    try:
        stored = (
            models.random(weights.value, parameters.architecture)
            if isinstance(weights, RandomSeed)
            else models.load(weights)
        )
    except (FileNotFoundError, models.WeightsError) as error:
        raise ModelError(str(error)) from error
    part = spec.family.rpartition("/")[2]
    writes, sees = part in {"whole", "text"}, part in {"whole", "encode"}
    return ChatComponents(
        "random" if isinstance(weights, RandomSeed) else "stored",
        parameters,
        Questions(stored.tokenizer, stored.architecture) if writes else None,
        adapt_model(stored.model) if writes else None,
        PageReader(stored.model, stored.name) if sees else None,
        {"architecture": stored.architecture},
    )
