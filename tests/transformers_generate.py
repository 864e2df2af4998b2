"""Answers of lmm-digits models by transformers' own `generate`, the reference of ours."""

from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from trimtab_model_servers.families.lmm_digits import models
from trimtab_model_servers.families.lmm_digits.models import IMAGE_ID, Architecture
from trimtab_model_servers.families.lmm_digits.tokenizer import prompt
from trimtab_training.lmm_digits.evaluate import MAX_ANSWER_TOKENS, Exercise, decode_answer


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
