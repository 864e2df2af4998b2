"""Generative models of benchmarks: random weights for text, and the trained ones of pipelines/lmm-digits."""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
import torch
from torch import Tensor

from benchmarks.engine.race import STREAMS, Outputs, Prompt, padded, run_engine
from tests.lmm_digits_answers import Exercise, generate_inputs
from trimtab_model_servers.engine.core import EngineCore
from trimtab_model_servers.engine.model_adapters import adapt_model
from trimtab_model_servers.engine.request import Image, Request
from trimtab_model_servers.engine.scheduler import EngineLimits
from trimtab_model_servers.families.hf_chat.configs import CONFIGS
from trimtab_model_servers.families.hf_chat.parts import Placement, Precision, load_part
from trimtab_model_servers.families.lmm_digits import models
from trimtab_model_servers.families.lmm_digits.models import END_ID, IMAGE_ID, PAD_ID, PAGE_TOKENS, Architecture
from trimtab_model_servers.weights.source import RandomSeed
from trimtab_training.lmm_digits.page_generator import CellPageSource
from trimtab_training.lmm_digits.questions import PAGES, Kind, ask, fits

OUTPUT_TOKENS: Final = (16, 128)
VOCABULARY: Final = 512
PUBLISHED_VOCABULARY: Final = 256
"""Token ids that every published model has."""
WEIGHTS: Final = Path("pipelines/lmm-digits/weights")
PAGE_SEED, PAGE_POOL = 91, 150
"""Fewer pages than questions, so that prefixes are shared."""
_TRANSFORMERS: Any = import_module("transformers")  # its own types take mypy minutes


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of published models with random weights."""
    parser.add_argument("--published", choices=tuple(CONFIGS), action="append", help="measure this model; repeatable")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default cpu)")
    parser.add_argument("--dtype", choices=get_args(Precision), default="float32", help="of a published model")


class RandomModel:
    """Text model with random weights: greedy, and no token ends an output."""

    def __init__(self, model: Any, decoder: Any, step_tokens: int) -> None:
        model.generation_config = _TRANSFORMERS.GenerationConfig(do_sample=False, pad_token_id=0)
        self._model, self._decoder, self._step_tokens = model, decoder, step_tokens

    @classmethod
    def small(cls, device: str) -> "RandomModel":
        """A Llama of 0.9 million parameters."""
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
        model = _TRANSFORMERS.LlamaForCausalLM(config).eval().to(device)
        return cls(model, model, step_tokens=256)

    @classmethod
    def published(cls, name: str, placement: Placement) -> "RandomModel":
        """The language model of a published size."""
        config = CONFIGS[name]("published")
        model = load_part(config, "language", RandomSeed(5), placement)
        return cls(model, getattr(model.model, config.decoder), step_tokens=2048)

    @torch.inference_mode()
    def generate(self, batch: Sequence[Prompt], max_tokens: int) -> Outputs:
        self._decoder.set_attn_implementation("sdpa")  # the engine replaces transformers' attention
        inputs = {name: tensor.to(self._model.device) for name, tensor in padded(batch, 0).items()}
        rows = self._model.generate(**inputs, max_new_tokens=max_tokens)
        outputs: Outputs = rows[:, inputs["input_ids"].shape[1] :].tolist()
        return outputs

    def run_engine(self, prompts: Sequence[Prompt]) -> Outputs:
        longest = max(len(prompt.tokens) + prompt.output_tokens for prompt in prompts)
        limits = EngineLimits(slots=STREAMS, slot_tokens=longest, step_tokens=self._step_tokens)
        requests = (
            Request(str(number), prompt.tokens, max_new_tokens=prompt.output_tokens)
            for number, prompt in enumerate(prompts)
        )
        return run_engine(EngineCore(adapt_model(self._model), limits), ((request, []) for request in requests))


def draw_prompts(count: int, prompt_tokens: tuple[int, int], vocabulary: int) -> list[Prompt]:
    """Draw prompts and lengths of outputs uniformly."""
    random = np.random.default_rng(9)
    lengths, outputs = random.integers(*prompt_tokens, size=count), random.integers(*OUTPUT_TOKENS, size=count)
    return [
        Prompt(tuple(random.integers(1, vocabulary, size=length).tolist()), int(output))
        for length, output in zip(lengths, outputs, strict=True)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class ChatPrompt(Prompt):
    """A chat's prompt, with its pages' pixels [pages, 1, 96, 96] and numbers in the pool."""

    pixels: Tensor
    pages: tuple[int, ...]

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Equal for the same question about the same pages."""
        return self.tokens, self.pages


class TrainedModel:
    """A trained model, loaded twice: for `generate` and for the engine."""

    def __init__(self, architecture: Architecture, device: str) -> None:
        path = WEIGHTS / f"{architecture}.safetensors"
        stored = models.load(path)
        self._tokenizer, self._model = stored.tokenizer, stored.model.to(device)
        self._adapter = adapt_model(models.load(path).model.to(device))
        self._architecture = architecture
        self.placeholders = models.placeholders(architecture)

    def draw_chats(self, count: int, output_tokens: tuple[int, int], seed: int) -> list[ChatPrompt]:
        """Draw chats of every kind about a pool of held-out pages."""
        source, random = CellPageSource("held-out", PAGE_SEED), np.random.default_rng(seed)
        pool = [source.page(index) for index in range(PAGE_POOL)]
        chats: list[ChatPrompt] = []
        while len(chats) < count:
            kind = list(Kind)[int(random.integers(len(Kind)))]
            fewest, most = PAGES[kind]
            numbers = random.integers(PAGE_POOL, size=int(random.integers(fewest, most + 1))).tolist()
            pages = [pool[number] for number in numbers]
            if fits(kind, [page.cells for page in pages]):
                question = ask(kind, [page.cells for page in pages], random)
                exercise = Exercise(question, tuple(pages))
                inputs = generate_inputs(self._architecture, self._tokenizer, exercise)
                pixels = [torch.from_numpy(page.pixels) for page in pages]
                stacked = torch.stack(pixels) if pixels else torch.zeros(0, 1, 96, 96)
                tokens = tuple(inputs["input_ids"][0].tolist())
                chats.append(ChatPrompt(tokens, int(random.integers(*output_tokens)), stacked, tuple(numbers)))
        return chats

    def draw_batchable_chats(self, count: int, seed: int) -> list[ChatPrompt]:
        """Draw chats that `generate` can run in batches.

        It derives the length of padded prompts from the first layer's cache. In a model with cross-attention that
        layer attends to pages, so a batch must have prompts of one length with one number of pages.

        Raises RuntimeError if too few of the drawn chats are alike.
        """
        if not self._adapter.cross_attention:
            return self.draw_chats(count, OUTPUT_TOKENS, seed)
        chats = self.draw_chats(8 * count, OUTPUT_TOKENS, seed)
        shapes = Counter((len(chat.tokens), len(chat.pages)) for chat in chats)
        shape, alike = shapes.most_common(1)[0]
        if alike < count:
            raise RuntimeError(f"{alike} of {8 * count} chats are alike, {count} are needed; use fewer --requests")
        return [chat for chat in chats if (len(chat.tokens), len(chat.pages)) == shape][:count]

    @torch.inference_mode()
    def generate(self, batch: Sequence[ChatPrompt], max_tokens: int) -> Outputs:
        inputs = {name: tensor.to(self._model.device) for name, tensor in self._inputs(batch).items()}
        rows = self._model.generate(**inputs, max_new_tokens=max_tokens, min_new_tokens=max_tokens)
        return [row[inputs["input_ids"].shape[1] :].tolist() for row in rows]

    def run_engine(self, prompts: Sequence[ChatPrompt]) -> Outputs:
        requests = (
            self.request(str(number), chat, chat.output_tokens, min_tokens=chat.output_tokens)
            for number, chat in enumerate(prompts)
        )
        return run_engine(self.core(STREAMS, 256), requests)

    def core(self, slots: int, step_tokens: int) -> EngineCore:
        image_tokens = 3 * PAGE_TOKENS if self._adapter.cross_attention else 0
        return EngineCore(self._adapter, EngineLimits(slots, 320, step_tokens, 100_000, image_tokens))

    def request(
        self, name: str, chat: ChatPrompt, max_tokens: int, min_tokens: int = 0
    ) -> tuple[Request, list[Tensor]]:
        """Return the engine's request of a chat, and the embeddings of its pages."""
        positions = [position for position, token in enumerate(chat.tokens) if token == IMAGE_ID]
        images = tuple(
            Image(str(page), position, self.placeholders, PAGE_TOKENS)
            for page, position in zip(chat.pages, positions[:: self.placeholders], strict=True)
        )
        request = Request(name, chat.tokens, images, max_tokens, min_tokens, end_ids=frozenset({END_ID}))
        return request, self._encode(chat.pixels)

    @torch.inference_mode()
    def _encode(self, pixels: Tensor) -> list[Tensor]:
        if not len(pixels):
            return []
        features = models.tower(self._model)(pixels.to(self._model.device)).last_hidden_state
        return list(self._model.model.multi_modal_projector(features))

    def _inputs(self, batch: Sequence[ChatPrompt]) -> dict[str, Tensor]:
        inputs = padded(batch, PAD_ID)
        pages = max(len(chat.pages) for chat in batch)
        if not pages:
            return inputs
        if self._architecture == "decoder-only":
            return inputs | {"pixel_values": torch.cat([chat.pixels for chat in batch])}
        return inputs | _cross_attention_inputs(batch, inputs["input_ids"], pages)


def _cross_attention_inputs(batch: Sequence[ChatPrompt], ids: Tensor, pages: int) -> dict[str, Tensor]:
    """Return Mllama's further inputs; chats with fewer pages get blank ones that are masked."""
    pixels = torch.zeros(len(batch), pages, 1, 1, 96, 96)
    for row, chat in enumerate(batch):
        pixels[row, : len(chat.pages), 0] = chat.pixels
    number = (ids == IMAGE_ID).cumsum(dim=1)
    mask = (number[..., None] == torch.arange(1, pages + 1)).long()
    return {
        "pixel_values": pixels,
        "aspect_ratio_ids": torch.ones(len(batch), pages, dtype=torch.int64),
        "aspect_ratio_mask": torch.ones(len(batch), pages, 1, dtype=torch.int64),
        "cross_attention_mask": mask[..., None],
    }
