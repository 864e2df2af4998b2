"""Tiny transformers models with random weights, and requests for `generate` and for the engine."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import torch

from trimtab_model_servers.engine.core import EngineCore
from trimtab_model_servers.engine.request import Image, Request

transformers: Any = import_module("transformers")
mllama: Any = import_module("transformers.models.mllama.configuration_mllama")
mllama_processing: Any = import_module("transformers.models.mllama.processing_mllama")

IMAGE_ID, VOCABULARY = 3, 97
LLAVA_TOKENS = 16
MLLAMA_TILE_TOKENS, MLLAMA_TILES = 5, 2
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llava(text: Any = None) -> Any:
    """A LLaVA with a CLIP tower: 16 tokens an image."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
    )
    config = transformers.LlavaConfig(
        text_config=text or transformers.LlamaConfig(num_hidden_layers=3, **TEXT),
        vision_config=vision,
        image_token_id=IMAGE_ID,
        vision_feature_layer=-1,
    )
    torch.manual_seed(1)
    return settled(transformers.LlavaForConditionalGeneration(config))


def mllama_model() -> Any:
    """An Mllama whose gates are open, so that its images count: 5 tokens a tile, one or two tiles."""
    text = mllama.MllamaTextConfig(num_hidden_layers=4, cross_attention_layers=[1, 3], **TEXT)
    vision = mllama.MllamaVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_global_layers=1,
        attention_heads=2,
        image_size=32,
        patch_size=16,
        max_num_tiles=MLLAMA_TILES,
        intermediate_layers_indices=[0],
        vision_output_dim=64,
        supported_aspect_ratios=[[1, 1], [1, 2]],
    )
    torch.manual_seed(2)
    config = mllama.MllamaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE_ID)
    model = settled(transformers.MllamaForConditionalGeneration(config))
    for layer in text.cross_attention_layers:
        model.model.language_model.layers[layer].cross_attn_attn_gate.data.fill_(0.8)
        model.model.language_model.layers[layer].cross_attn_mlp_gate.data.fill_(0.8)
    return model


def settled(model: Any) -> Any:
    """Set evaluation mode and greedy generation."""
    model.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=2, pad_token_id=0)
    return model.eval().requires_grad_(requires_grad=False)


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One request, as inputs of `generate` and as a request to the engine."""

    generate: dict[str, torch.Tensor]
    request: Request
    images: list[torch.Tensor]

    def exactly(self, tokens: int) -> "Asked":
        return replace(self, request=replace(self.request, min_new_tokens=tokens, max_new_tokens=tokens))

    def oracle(self, model: Any) -> list[int]:
        """Tokens that `generate` returns."""
        limits = {"min_new_tokens": self.request.min_new_tokens, "max_new_tokens": self.request.max_new_tokens}
        with torch.inference_mode():
            wrote = model.generate(**self.generate, **limits)
        return [int(token) for token in wrote[0, self.generate["input_ids"].shape[1] :]]


class RandomRequests(ABC):
    """Random requests to a model, some with a common prefix, with text before, between and after images."""

    pictures: int
    prefix: tuple[int, ...]

    def __init__(self, model: Any, seed: int) -> None:
        self.model, self.random = model, np.random.default_rng(seed)
        self.noise = torch.Generator().manual_seed(seed)

    def draw(self, name: str) -> Asked:
        """Draw text, then up to ``pictures`` images, adjacent or apart, and text."""
        random, images = self.random, list[Image]()
        shown = [int(image) for image in random.integers(self.pictures, size=random.integers(self.pictures + 1))]
        ids = [1, *(self.prefix if random.random() < 0.6 else words(random, len(self.prefix)))]
        for image in shown:
            ids += self.show(image, len(ids), images)
        ids += words(random, int(1 + random.integers(5)))
        written = int(1 + random.integers(12))
        inputs, embeddings = self.encode(shown, ids) if shown else ({}, [])
        inputs |= {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
        request = Request(name, tuple(ids), tuple(images), max_new_tokens=written, end_ids=frozenset({2}))
        return Asked(inputs, request, embeddings)

    @abstractmethod
    def show(self, picture: int, start: int, images: list[Image]) -> list[int]:
        """Add an image at a position; return its tokens and the text after it."""

    @abstractmethod
    def encode(self, shown: list[int], ids: list[int]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """Inputs of `generate` for images, and their embeddings."""


class LlavaRequests(RandomRequests):
    """Requests to the LLaVA; some images have markers within."""

    pictures, prefix = 2, (7, 8, 9, 10, 11)

    def __init__(self, model: Any, seed: int) -> None:
        super().__init__(model, seed)
        self.pixels = torch.randn(self.pictures, 3, 32, 32, generator=self.noise)
        with torch.inference_mode():
            self.embeddings = model.get_image_features(pixel_values=self.pixels, return_dict=True).pooler_output

    def show(self, picture: int, start: int, images: list[Image]) -> list[int]:
        random = self.random
        cut, marks = int(1 + random.integers(LLAVA_TOKENS - 1)), words(random, int(random.integers(3)))
        runs = ((start, cut), (start + cut + len(marks), LLAVA_TOKENS - cut)) if marks else ()
        images.append(Image(f"picture {picture}", start, LLAVA_TOKENS, LLAVA_TOKENS, segments=runs))
        after = words(random, int(random.integers(4)))
        return [IMAGE_ID] * cut + marks + [IMAGE_ID] * (LLAVA_TOKENS - cut) + after

    def encode(self, shown: list[int], ids: list[int]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        del ids
        return {"pixel_values": self.pixels[shown]}, [self.embeddings[picture] for picture in shown]


class MllamaRequests(RandomRequests):
    """Requests to the Mllama, whose pictures have one or two tiles."""

    pictures, prefix = 2, (7, 8, 9)
    tiles = (1, 2)

    def __init__(self, model: Any, seed: int) -> None:
        super().__init__(model, seed)
        self.pixels = torch.randn(self.pictures, MLLAMA_TILES, 3, 32, 32, generator=self.noise)

    def show(self, picture: int, start: int, images: list[Image]) -> list[int]:
        tokens = self.tiles[picture] * MLLAMA_TILE_TOKENS
        padding = MLLAMA_TILES * MLLAMA_TILE_TOKENS - tokens
        images.append(Image(f"picture {picture}", start, 1, tokens, padding))
        return [IMAGE_ID, *words(self.random, int(self.random.integers(3)))]

    def encode(self, shown: list[int], ids: list[int]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """The cross-attention mask is that of the processor's own functions."""
        tiles = [self.tiles[picture] for picture in shown]
        tile_mask = torch.tensor([[1, 1 if count == 2 else 0] for count in tiles])
        pixels = self.pixels[shown] * tile_mask[:, :, None, None, None]
        tower = {
            "pixel_values": pixels[None],
            "aspect_ratio_ids": torch.tensor([tiles]),
            "aspect_ratio_mask": tile_mask[None],
        }
        with torch.inference_mode():
            seen = self.model.model.vision_model(**tower).last_hidden_state
            projected = self.model.model.multi_modal_projector(seen)[0]
        sparse = mllama_processing.get_cross_attention_token_mask(ids, IMAGE_ID)
        mask = mllama_processing.convert_sparse_cross_attention_mask_to_dense([sparse], [tiles], MLLAMA_TILES, len(ids))
        return tower | {"cross_attention_mask": torch.from_numpy(mask)}, list(projected.flatten(1, 2))


def words(random: np.random.Generator, count: int) -> list[int]:
    """Random ids of no special token."""
    return [int(word) for word in random.integers(4, VOCABULARY, size=count)]


def complete(core: EngineCore) -> None:
    while core.step():
        pass
