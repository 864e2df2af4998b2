"""Answers of lmm-digits models by the engine, and by transformers' own `generate`, its reference."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from trimtab_model_servers.engine.core import EngineCore, EngineEvent
from trimtab_model_servers.engine.model_adapters import adapt_model
from trimtab_model_servers.engine.request import Image, Request, TokenChunk
from trimtab_model_servers.engine.scheduler import EngineLimits
from trimtab_model_servers.families.lmm_digits import models
from trimtab_model_servers.families.lmm_digits.models import END_ID, IMAGE_ID, PAGE_TOKENS, Architecture
from trimtab_model_servers.families.lmm_digits.tokenizer import prompt
from trimtab_training.lmm_digits.page_generator import CellPage, CellPageSource
from trimtab_training.lmm_digits.questions import MAX_PAGES, PAGES, Kind, Question, ask, fits

MAX_ANSWER_TOKENS: Final = 6
MAX_CHAT_TOKENS: Final = 160
SLOTS: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class Exercise:
    """A question and its pages."""

    question: Question
    pages: tuple[CellPage, ...]


def draw_exercises(kind: Kind, count: int, source: CellPageSource, seed: int = 22) -> list[Exercise]:
    """Draw questions of one kind, each about new pages."""
    random = np.random.default_rng([seed, list(Kind).index(kind)])
    least, most = PAGES[kind]
    drawn: list[Exercise] = []
    index = list(Kind).index(kind) * 1_000_000
    while len(drawn) < count:
        number = int(random.integers(least, most + 1))
        pages = tuple(source.page(index + offset) for offset in range(number))
        index += number
        if fits(kind, [page.cells for page in pages]):
            drawn.append(Exercise(ask(kind, [page.cells for page in pages], random), pages))
    return drawn


def answer_all(
    model: Any, architecture: Architecture, tokenizer: Tokenizer, exercises: Sequence[Exercise]
) -> list[str]:
    """Answer many exercises in the engine, several times as fast as `generate`.

    Afterwards the model runs in the engine only.
    """
    adapter = adapt_model(model)
    limits = EngineLimits(
        SLOTS,
        MAX_CHAT_TOKENS,
        max_waiting=len(exercises),
        image_tokens=MAX_PAGES * PAGE_TOKENS * adapter.cross_attention,
    )
    core, tokens = EngineCore(adapter, limits, share_prefixes=False), [list[int]() for _ in exercises]

    def append_token(event: EngineEvent) -> None:
        if isinstance(event, TokenChunk):
            tokens[int(event.request_id)].append(event.token)

    for number, exercise in enumerate(exercises):
        core.submit(*_engine_inputs(model, architecture, tokenizer, exercise, str(number)), append_token)
        core.step()
    while core.step():
        pass
    return [decode_answer(tokenizer, ids) for ids in tokens]


def _engine_inputs(
    model: Any, architecture: Architecture, tokenizer: Tokenizer, exercise: Exercise, name: str
) -> tuple[Request, list[Tensor]]:
    placeholders = models.placeholders(architecture)
    ids = prompt(tokenizer, exercise.question.text, len(exercise.pages), page_tokens=placeholders)
    positions = [position for position, token in enumerate(ids) if token == IMAGE_ID][::placeholders]
    images = tuple(Image(f"{name} {position}", position, placeholders, PAGE_TOKENS) for position in positions)
    request = Request(name, tuple(ids), images, max_new_tokens=MAX_ANSWER_TOKENS, end_ids=frozenset({END_ID}))
    if not images:
        return request, []
    pixels = torch.from_numpy(np.stack([page.pixels for page in exercise.pages]))
    with torch.inference_mode():
        return request, list(model.model.multi_modal_projector(models.tower(model)(pixels).last_hidden_state))


def decode_answer(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Decode ids up to the end token."""
    ids = list(ids)
    text_ids = ids[: ids.index(END_ID)] if END_ID in ids else ids
    return str(tokenizer.decode(text_ids))


def generate_inputs(architecture: Architecture, tokenizer: Tokenizer, exercise: Exercise) -> dict[str, Tensor]:
    """Arguments of transformers' `generate` for one exercise."""
    page_tokens = models.placeholders(architecture)
    pages = len(exercise.pages)
    ids = prompt(tokenizer, exercise.question.text, pages, page_tokens=page_tokens)
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    if not pages:
        return inputs
    pixels = torch.from_numpy(np.stack([page.pixels for page in exercise.pages]))
    return inputs | page_inputs(architecture, inputs["input_ids"], pixels)


def page_inputs(architecture: Architecture, ids: Tensor, pixels: Tensor) -> dict[str, Tensor]:
    """Image arguments of `generate` for pages [pages, 1, 96, 96] and a prompt [1, L]."""
    if architecture == "decoder-only":
        return {"pixel_values": pixels}
    pages = len(pixels)
    visible = ((ids == IMAGE_ID).cumsum(dim=1)[..., None] == torch.arange(1, pages + 1)).float()
    return {
        "pixel_values": pixels[None, :, None],
        "aspect_ratio_ids": torch.ones(1, pages, dtype=torch.int64),
        "aspect_ratio_mask": torch.ones(1, pages, 1, dtype=torch.int64),
        "cross_attention_mask": visible[..., None],
    }


def answer(model: Any, architecture: Architecture, tokenizer: Tokenizer, exercise: Exercise) -> str:
    """Answer one exercise with transformers' greedy `generate`."""
    inputs = generate_inputs(architecture, tokenizer, exercise)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS)
    return decode_answer(tokenizer, output[0, inputs["input_ids"].shape[1] :].tolist())
