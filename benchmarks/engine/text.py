"""Models that write, weights random, and requests to them: one small enough for a core, others of published sizes."""

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final

import numpy as np
import torch

from benchmarks.engine.race import Ask, Race, Way, continuous, sequential, static_batches
from trimtab_model_servers.families.hf_vlm.configs import CONFIGS, Size
from trimtab_model_servers.families.hf_vlm.parts import Placement, load_part
from trimtab_model_servers.weights.source import RandomSeed

VOCABULARY: Final = 512
LEAST_VOCABULARY: Final = 256
"""Words that every published model has, `tiny` ones too."""

PROMPT: Final = (40, 200)
LONG_PROMPT: Final = (100, 1500)
"""To a published size: an image of 896 pixels is some thousand tokens, a question about it a hundred."""

WRITTEN: Final = (16, 128)
ALONE: Final = 8
"""How many ``generate`` answers one after another in a published size: it writes one token where others write 16."""

_TRANSFORMERS: Any = import_module("transformers")  # not by name: its own types take mypy minutes


def ask(count: int, prompt: tuple[int, int], vocabulary: int) -> list[Ask]:
    """Draw requests: lengths of prompts and answers uniform."""
    random = np.random.default_rng(9)
    prompts, written = random.integers(*prompt, size=count), random.integers(*WRITTEN, size=count)
    return [
        Ask(tuple(random.integers(1, vocabulary, size=length).tolist()), int(new))
        for length, new in zip(prompts, written, strict=True)
    ]


def small(requests: int, device: str) -> Race:
    """Race a Llama of 0.9 million parameters."""
    asked, alone, served = ask(requests, PROMPT, VOCABULARY), _tiny().to(device), _tiny().to(device)
    return Race(
        {
            "sequential": Way(lambda: sequential(alone, asked), _written(asked)),
            "static": Way(lambda: static_batches(alone, asked), _written(asked)),
            "engine": Way(lambda: continuous(served, asked, 256), _written(asked)),
        },
        device,
    )


def published(name: str, requests: int, kept: Placement, size: Size = "published") -> Race:
    """Race the half of a published model that writes; its weights are in memory once."""
    asked = ask(requests, LONG_PROMPT, LEAST_VOCABULARY)
    shape = CONFIGS[name](size)
    model = _settled(load_part(shape, "language", RandomSeed(5), kept))
    for_itself = partial(_as_published, model, shape.decoder)
    return Race(
        {
            "sequential": Way(lambda: sequential(for_itself(), asked[:ALONE]), _written(asked[:ALONE])),
            "static": Way(lambda: static_batches(for_itself(), asked), _written(asked)),
            "engine": Way(lambda: continuous(model, asked, 2048), _written(asked)),
        },
        kept.torch_device.type,
    )


def _as_published(model: Any, decoder: str) -> Any:
    """The model with transformers' own attention, which it lost where the engine ran it."""
    getattr(model.model, decoder).set_attn_implementation("sdpa")
    return model


def _tiny() -> Any:
    """A Llama with weights drawn by a fixed seed."""
    torch.manual_seed(5)
    config = _TRANSFORMERS.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
    )
    return _settled(_TRANSFORMERS.LlamaForCausalLM(config).eval())


def _settled(model: Any) -> Any:
    """Greedy, and to the end: no token ends an answer."""
    model.generation_config = _TRANSFORMERS.GenerationConfig(do_sample=False, pad_token_id=0)
    return model


def _written(asked: Sequence[Ask]) -> int:
    return sum(each.written for each in asked)
