"""Tiny transformers models with random weights, and requests for `generate` and for the engine."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch

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
    written: int

    def oracle(self, model: Any) -> list[int]:
        """Tokens that `generate` returns."""
        with torch.inference_mode():
            wrote = model.generate(**self.generate, max_new_tokens=self.written)
        return [int(token) for token in wrote[0, self.generate["input_ids"].shape[1] :]]


class LlavaRequests:
    """Random requests to the LLaVA, some with a common prefix."""

    def __init__(self, model: Any, seed: int) -> None:
        self.model = model
        self.random = np.random.default_rng(seed)
        self.pixels = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
        with torch.inference_mode():
            self.embeddings = model.get_image_features(pixel_values=self.pixels, return_dict=True).pooler_output

    def draw(self, name: str) -> Asked:
        """Draw text, then up to two images with text between, some with markers within."""
        random = self.random
        shown = [int(image) for image in random.integers(3, size=random.integers(3))]
        ids, images = [1, *([7, 8, 9, 10, 11] if random.random() < 0.5 else words(random, 6))], []
        for image in shown:
            cut, marks = int(1 + random.integers(LLAVA_TOKENS - 1)), words(random, int(random.integers(3)))
            runs = ((len(ids), cut), (len(ids) + cut + len(marks), LLAVA_TOKENS - cut))
            pieces = runs if marks else ()
            images.append(Image(f"picture {image}", len(ids), LLAVA_TOKENS, LLAVA_TOKENS, segments=pieces))
            ids += [IMAGE_ID] * cut + marks + [IMAGE_ID] * (LLAVA_TOKENS - cut)
            ids += words(random, int(random.integers(4)))
        ids += words(random, int(1 + random.integers(5)))
        written = int(1 + random.integers(12))
        generate = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
        if shown:
            generate["pixel_values"] = self.pixels[shown]
        request = Request(name, tuple(ids), tuple(images), max_new_tokens=written, end_ids=frozenset({2}))
        return Asked(generate, request, [self.embeddings[image] for image in shown], written)


class MllamaRequests:
    """Random requests to the Mllama, some with a common prefix, with text before, between and after images."""

    def __init__(self, model: Any, seed: int) -> None:
        self.model = model
        self.random = np.random.default_rng(seed)
        self.pixels = torch.randn(4, MLLAMA_TILES, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
        self.tiles = [1, 2, 1, 2]

    def draw(self, name: str) -> Asked:
        """Draw text, then up to three images, adjacent or apart."""
        random = self.random
        shown = [int(image) for image in random.integers(2, size=random.integers(4))]
        ids = [1, *([7, 8, 9] if random.random() < 0.6 else words(random, 3))]
        images = []
        for image in shown:
            tokens = self.tiles[image] * MLLAMA_TILE_TOKENS
            padding = MLLAMA_TILES * MLLAMA_TILE_TOKENS - tokens
            images.append(Image(f"picture {image}", len(ids), 1, tokens, padding))
            ids += [IMAGE_ID, *words(random, int(random.integers(3)))]
        ids += words(random, int(1 + random.integers(5)))
        written = int(1 + random.integers(12))
        generate = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
        embeddings: list[torch.Tensor] = []
        if shown:
            tower = self._tower_inputs(shown)
            generate |= {**tower, "cross_attention_mask": self._mask(ids, shown)}
            with torch.inference_mode():
                seen = self.model.model.vision_model(**tower).last_hidden_state
                projected = self.model.model.multi_modal_projector(seen)[0]
            embeddings = list(projected.flatten(1, 2))
        request = Request(name, tuple(ids), tuple(images), max_new_tokens=written, end_ids=frozenset({2}))
        return Asked(generate, request, embeddings, written)

    def _tower_inputs(self, shown: list[int]) -> dict[str, torch.Tensor]:
        tiles = [self.tiles[image] for image in shown]
        pixels = self.pixels[shown].clone()
        mask = torch.tensor([[1, 1 if count == 2 else 0] for count in tiles])
        pixels[mask == 0] = 0
        return {
            "pixel_values": pixels[None],
            "aspect_ratio_ids": torch.tensor([tiles]),
            "aspect_ratio_mask": mask[None],
        }

    def _mask(self, ids: list[int], shown: list[int]) -> torch.Tensor:
        """Cross-attention mask by the processor's own functions."""
        sparse = mllama_processing.get_cross_attention_token_mask(ids, IMAGE_ID)
        dense = mllama_processing.convert_sparse_cross_attention_mask_to_dense(
            [sparse], [[self.tiles[image] for image in shown]], MLLAMA_TILES, len(ids)
        )
        return torch.from_numpy(dense)


def words(random: np.random.Generator, count: int) -> list[int]:
    """Random ids of no special token."""
    return [int(word) for word in random.integers(4, VOCABULARY, size=count)]
