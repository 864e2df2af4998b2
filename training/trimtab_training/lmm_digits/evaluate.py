"""How many answers are right to the letter, on held-out handwriting, for each kind of question, with an interval."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from trimtab_model_servers.engine.core import EngineCore, EngineEvent
from trimtab_model_servers.engine.model_adapters import adapt_model
from trimtab_model_servers.engine.request import Image, Request, TokenChunk
from trimtab_model_servers.engine.scheduler import EngineLimits
from trimtab_model_servers.families.lmm_digits import models
from trimtab_model_servers.families.lmm_digits.models import ARCHITECTURES, END_ID, IMAGE_ID, Architecture
from trimtab_model_servers.families.lmm_digits.tokenizer import prompt
from trimtab_model_servers.families.lmm_digits.vision_tower import PAGE_TOKENS
from trimtab_training.digits.evaluate import wilson
from trimtab_training.lmm_digits.page_generator import CellPage, CellPageSource
from trimtab_training.lmm_digits.questions import MAX_PAGES, PAGES, Kind, Question, ask, fits

HELD_OUT_SEED: Final = 22
ASKED_OF_EACH_KIND: Final = 500
LONGEST_ANSWER: Final = 6
LONGEST_CHAT: Final = 160
STREAMS: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class Exercise:
    """A question beside the pages it is about."""

    question: Question
    pages: tuple[CellPage, ...]


def exercises(kind: Kind, count: int, source: CellPageSource, seed: int = HELD_OUT_SEED) -> list[Exercise]:
    """Draw questions of one kind; each page is used once."""
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


def generate_inputs(architecture: Architecture, tokenizer: Tokenizer, exercise: Exercise) -> dict[str, Tensor]:
    """What transformers' ``generate`` takes to answer one exercise."""
    page_tokens = models.placeholders(architecture)
    pages = len(exercise.pages)
    spelled = prompt(tokenizer, exercise.question.text, pages, page_tokens=page_tokens)
    inputs = {"input_ids": torch.tensor([spelled]), "attention_mask": torch.ones(1, len(spelled), dtype=torch.int64)}
    if not pages:
        return inputs
    pixels = torch.from_numpy(np.stack([page.pixels for page in exercise.pages]))
    return inputs | page_inputs(architecture, inputs["input_ids"], pixels)


def page_inputs(architecture: Architecture, ids: Tensor, pixels: Tensor) -> dict[str, Tensor]:
    """What ``generate`` takes of pages [pages, 1, 96, 96] beside a prompt [1, L]."""
    if architecture == "decoder-only":
        return {"pixel_values": pixels}
    pages = len(pixels)
    seen = ((ids == IMAGE_ID).cumsum(dim=1)[..., None] == torch.arange(1, pages + 1)).float()
    return {
        "pixel_values": pixels[None, :, None],
        "aspect_ratio_ids": torch.ones(1, pages, dtype=torch.int64),
        "aspect_ratio_mask": torch.ones(1, pages, 1, dtype=torch.int64),
        "cross_attention_mask": seen[..., None],
    }


def answer(model: Any, architecture: Architecture, tokenizer: Tokenizer, exercise: Exercise) -> str:
    """Answer one exercise with transformers' own greedy ``generate``."""
    inputs = generate_inputs(architecture, tokenizer, exercise)
    with torch.inference_mode():
        written = model.generate(**inputs, max_new_tokens=LONGEST_ANSWER)
    return decode_answer(tokenizer, written[0, inputs["input_ids"].shape[1] :].tolist())


def answer_all(model: Any, architecture: Architecture, tokenizer: Tokenizer, asked: Sequence[Exercise]) -> list[str]:
    """Answer many exercises in the engine, which writes what ``generate`` writes, several times as fast.

    The model runs in the engine only from then on.
    """
    adapter = adapt_model(model)
    limits = EngineLimits(
        STREAMS, LONGEST_CHAT, max_waiting=len(asked), image_tokens=MAX_PAGES * PAGE_TOKENS * adapter.cross_attention
    )
    core, written = EngineCore(adapter, limits, share_prefixes=False), [list[int]() for _ in asked]

    def hear(event: EngineEvent) -> None:
        if isinstance(event, TokenChunk):
            written[int(event.request_id)].append(event.token)

    for number, exercise in enumerate(asked):
        core.submit(*_engine_inputs(model, architecture, tokenizer, exercise, str(number)), hear)
        core.step()
    while core.step():
        pass
    return [decode_answer(tokenizer, ids) for ids in written]


def _engine_inputs(
    model: Any, architecture: Architecture, tokenizer: Tokenizer, exercise: Exercise, name: str
) -> tuple[Request, list[Tensor]]:
    placeholders = models.placeholders(architecture)
    ids = prompt(tokenizer, exercise.question.text, len(exercise.pages), page_tokens=placeholders)
    places = [place for place, token in enumerate(ids) if token == IMAGE_ID][::placeholders]
    images = tuple(Image(f"{name} {place}", place, placeholders, PAGE_TOKENS) for place in places)
    request = Request(name, tuple(ids), images, max_new_tokens=LONGEST_ANSWER, end_ids=frozenset({END_ID}))
    if not images:
        return request, []
    pixels = torch.from_numpy(np.stack([page.pixels for page in exercise.pages]))
    with torch.inference_mode():
        return request, list(model.model.multi_modal_projector(models.tower(model)(pixels).last_hidden_state))


def decode_answer(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """What ids say up to the end of the turn."""
    ids = list(ids)
    said = ids[: ids.index(END_ID)] if END_ID in ids else ids
    return str(tokenizer.decode(said))


def measure_folder(weights: Path, tell: Callable[[str], None]) -> dict[str, object]:
    """Measure every model whose weights lie in ``weights`` and describe the result as ``accuracy.json`` holds it."""
    source = CellPageSource("held-out", HELD_OUT_SEED)
    asked = {kind: exercises(kind, ASKED_OF_EACH_KIND, source) for kind in Kind}
    report: dict[str, object] = {}
    for architecture in ARCHITECTURES:
        path = weights / f"{architecture}.safetensors"
        if path.is_file():
            stored = models.load(path)
            found = measure(stored.model, architecture, stored.tokenizer, asked, tell)
            report[architecture] = {**_provenance(path), **found}
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
    asked: dict[Kind, list[Exercise]],
    tell: Callable[[str], None],
) -> dict[str, object]:
    """The share of right answers to each kind, and their mean."""
    kinds: dict[str, dict[str, float]] = {}
    all_right = 0
    for kind, of_kind in asked.items():
        said = answer_all(model, architecture, tokenizer, of_kind)
        right = sum(one == each.question.answer for one, each in zip(said, of_kind, strict=True))
        all_right += right
        kinds[kind.value] = _share(right, len(of_kind))
        tell(f"{architecture} {kind.value}: {kinds[kind.value]}")
    whole = _share(all_right, sum(len(of_kind) for of_kind in asked.values()))
    tell(f"{architecture}, all: {whole}")
    return {**whole, "kinds": kinds}


def _share(right: int, asked: int) -> dict[str, float]:
    found = wilson(right, asked)
    return {
        "accuracy": round(found.value, 4),
        "n": found.n,
        "low": round(found.low, 4),
        "high": round(found.high, 4),
    }


def _provenance(path: Path) -> dict[str, float]:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        parameters = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118  (no mapping)
    trained = {key: float(metadata[key]) for key in ("seed", "steps", "batch", "processor_seconds")}
    return {"parameters": parameters, "weights_bytes": path.stat().st_size, **trained}
