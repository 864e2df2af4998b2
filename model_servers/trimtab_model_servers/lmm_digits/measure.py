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

from trimtab_model_servers.digits.measure import wilson
from trimtab_model_servers.lmm_digits import models
from trimtab_model_servers.lmm_digits.models import ARCHITECTURES, END_ID, IMAGE_ID, Architecture
from trimtab_model_servers.lmm_digits.pages import CellPage, CellPageSource
from trimtab_model_servers.lmm_digits.questions import PAGES, Kind, Question, ask, fits
from trimtab_model_servers.lmm_digits.tokens import prompt

HELD_OUT_SEED: Final = 22
ASKED_OF_EACH_KIND: Final = 500
LONGEST_ANSWER: Final = 6


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
    page_tokens, registers = models.text_of_page(architecture)
    pages = len(exercise.pages)
    spelled = prompt(tokenizer, exercise.question.text, pages, page_tokens=page_tokens, registers=registers)
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
    return spoken(tokenizer, written[0, inputs["input_ids"].shape[1] :].tolist())


def spoken(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
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
        "models": report,
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
    for kind, of_kind in asked.items():
        right = sum(answer(model, architecture, tokenizer, each) == each.question.answer for each in of_kind)
        found = wilson(right, len(of_kind))
        kinds[kind.value] = {
            "accuracy": found.value,
            "n": found.n,
            "low": round(found.low, 4),
            "high": round(found.high, 4),
        }
        tell(f"{architecture} {kind.value}: {found.value:.3f} ({found.low:.3f} to {found.high:.3f}, n = {found.n})")
    mean = sum(each["accuracy"] for each in kinds.values()) / len(kinds)
    tell(f"{architecture} mean: {mean:.4f}")
    return {"mean": round(mean, 4), "kinds": kinds}


def _provenance(path: Path) -> dict[str, float]:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        parameters = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118  (no mapping)
    trained = {key: float(metadata[key]) for key in ("seed", "steps", "batch", "training_seconds")}
    return {"parameters": parameters, "weights_bytes": path.stat().st_size, **trained}
