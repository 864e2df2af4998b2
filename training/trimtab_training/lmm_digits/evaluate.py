"""Evaluation of lmm-digits models: share of exact answers to held-out questions of each kind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
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
from trimtab_model_servers.families.lmm_digits.models import ARCHITECTURES, END_ID, IMAGE_ID, PAGE_TOKENS, Architecture
from trimtab_model_servers.families.lmm_digits.tokenizer import prompt
from trimtab_training.lmm_digits.page_generator import CellPage, CellPageSource
from trimtab_training.lmm_digits.questions import MAX_PAGES, PAGES, Kind, Question, ask, fits
from trimtab_training.trainer import accuracy_entry, weights_entry

HELD_OUT_SEED: Final = 22
EXERCISES_PER_KIND: Final = 500
MAX_ANSWER_TOKENS: Final = 6
MAX_CHAT_TOKENS: Final = 160
SLOTS: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class Exercise:
    """A question and its pages."""

    question: Question
    pages: tuple[CellPage, ...]


def draw_exercises(kind: Kind, count: int, source: CellPageSource, seed: int = HELD_OUT_SEED) -> list[Exercise]:
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


def measure_folder(weights: Path, log: Callable[[str], None]) -> dict[str, object]:
    """Measure every model with weights in a folder; return the content of `accuracy.json`."""
    source = CellPageSource("held-out", HELD_OUT_SEED)
    by_kind = {kind: draw_exercises(kind, EXERCISES_PER_KIND, source) for kind in Kind}
    report: dict[str, object] = {}
    for architecture in ARCHITECTURES:
        path = weights / f"{architecture}.safetensors"
        if path.is_file():
            loaded = models.load(path)
            accuracies = measure(loaded.model, architecture, loaded.tokenizer, by_kind, log)
            keys = ("seed", "steps", "batch", "processor_seconds")
            report[architecture] = {**weights_entry(path, keys), **accuracies}
    return {
        "split": "held-out by source image and photo region",
        "answers": "exact, to the letter",
        "interval": "Wilson, 95 %",
        "page_seed": HELD_OUT_SEED,
        "variants": report,
    }


def measure(
    model: Any,
    architecture: Architecture,
    tokenizer: Tokenizer,
    by_kind: dict[Kind, list[Exercise]],
    log: Callable[[str], None],
) -> dict[str, object]:
    """Accuracy of each kind, and of all kinds."""
    kinds: dict[str, dict[str, float]] = {}
    total_correct = 0
    for kind, drawn in by_kind.items():
        answers = answer_all(model, architecture, tokenizer, drawn)
        correct = sum(text == exercise.question.answer for text, exercise in zip(answers, drawn, strict=True))
        total_correct += correct
        kinds[kind.value] = accuracy_entry(correct, len(drawn))
        log(f"{architecture} {kind.value}: {kinds[kind.value]}")
    overall = accuracy_entry(total_correct, sum(len(drawn) for drawn in by_kind.values()))
    log(f"{architecture}, all: {overall}")
    return {**overall, "kinds": kinds}
