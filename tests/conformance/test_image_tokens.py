"""Image tokens predicted from sizes, compared with each model's own processor or encoder.

Processors are transformers' classes with the configurations of the models' pages on the hub. They get an image of every
size with a prompt: its placeholders are counted, the tiles that would be encoded, and the markers of tiles.
"""

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from trimtab_model_servers.chat.interfaces import EmbeddingShape
from trimtab_model_servers.families.hf_chat.configs import CONFIGS, VlmConfig
from trimtab_model_servers.families.lmm_digits import models
from trimtab_model_servers.families.lmm_digits.family import PageEncoder
from trimtab_pipelines.image_tokens import RULES, Canvas, ImageTokenRule, ImageTokens, NearestGrid

EDGES = [
    *((1, 1), (1, 2999), (2999, 1), (7, 5000), (900, 451)),
    *((side, side) for side in (336, 384, 448, 560, 896, 1120, 2304)),
    *((672, 336), (448, 896), (1120, 560)),
]
SIZES = [(int(height), int(width)) for height, width in np.random.default_rng(3).integers(1, 3000, (985, 2))] + EDGES
"""(height, width), 1,000 of them, for the parts of processors that count without an image."""
LEAST_PX, MOST_PX = 8, 3000
SEED: Final = 7
_PATCHES: Final = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_UNKNOWN: Final = "<unk>"
_WORDS: Final = ("<image>", "<video>", "<|image|>", "<|python_tag|>", "<img>", "</img>", "<context>")
_TAGS: Final = tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))
_TILES: Final = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *_TAGS)
_INTERNVL: Final = dict(
    zip(("start_image_token", "end_image_token", "context_image_token"), _WORDS[4:], strict=True)
) | {"video_token": _WORDS[1]}


class Count(NamedTuple):
    """Tokens of the images of one prompt; markers are those that name rows and columns of tiles."""

    placeholders: int
    encoded: int
    markers: int = 0


Size = tuple[int, int]
"""Width and height, px."""
Counter = Callable[[Sequence[Size]], Count]
"""Counts the tokens of one prompt's images as a processor or an encoder makes them."""


@cache
def _transformers() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    return import_module("transformers")


def _tokenizer(**named: Any) -> Any:
    words = {word: number for number, word in enumerate((_UNKNOWN, *_WORDS, *_TILES))}
    own = Tokenizer(WordLevel(words, unk_token=_UNKNOWN))
    own.add_special_tokens([*_WORDS, *_TILES])
    return _transformers().PreTrainedTokenizerFast(
        tokenizer_object=own, unk_token=_UNKNOWN, bos_token=_UNKNOWN, **named
    )


def _clip(side: int) -> dict[str, Any]:
    return {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}


def _square(side: int) -> dict[str, Any]:
    return {"size": {"height": side, "width": side}}


def _processor(family: str) -> tuple[Any, int]:
    """A family's processor, and the tokens of a tile."""
    t = _transformers()
    match family:
        case "llava-1.5":
            return t.LlavaProcessor(t.CLIPImageProcessor(**_clip(336)), _tokenizer(), **_PATCHES), 576
        case "llava-next":
            return t.LlavaNextProcessor(t.LlavaNextImageProcessor(**_clip(336)), _tokenizer(), **_PATCHES), 576
        case "llava-onevision":
            parts = t.LlavaOnevisionImageProcessor(), _tokenizer(), t.LlavaOnevisionVideoProcessor()
            return t.LlavaOnevisionProcessor(*parts, num_image_tokens=729, vision_feature_select_strategy="full"), 729
        case "internvl":
            images = t.GotOcr2ImageProcessor(**_square(448), crop_to_patches=True, min_patches=1, max_patches=12)
            words, video = _tokenizer(extra_special_tokens=_INTERNVL), t.InternVLVideoProcessor()
            return t.InternVLProcessor(images, words, video, image_seq_length=256), 256
        case "llama-3.2-vision":
            return t.MllamaProcessor(t.MllamaImageProcessor(**_square(560), max_image_tiles=4), _tokenizer()), 1601
        case "smolvlm" | "smolvlm-500m":
            tile, tokens = (384, 81) if family == "smolvlm" else (512, 64)
            sides = {"size": {"longest_edge": 4 * tile}, "max_image_size": {"longest_edge": tile}}
            return t.Idefics3Processor(t.Idefics3ImageProcessor(**sides), _tokenizer(), image_seq_len=tokens), tokens
    raise KeyError(family)


def processor_counter(family: str) -> Counter:
    """Counts with a published model's processor."""
    processor, tile_tokens = _processor(family)

    def count(sizes: Sequence[Size]) -> Count:
        images = [np.full((height, width, 3), 255, dtype=np.uint8) for width, height in sizes]
        prompt = processor(images=[images], text=processor.image_token * len(images), return_tensors="pt")
        placeholders = int((prompt["input_ids"] == processor.image_token_id).sum())
        has_markers = "rows" in prompt or "pixel_attention_mask" in prompt
        markers = prompt["input_ids"].numel() - placeholders if has_markers else 0
        tiles = prompt["pixel_values"].flatten(0, -4).flatten(1).any(dim=1)  # padding tiles are all zeros
        return Count(placeholders, int(tiles.sum()) * tile_tokens, markers)

    return count


def encoder_counter(architecture: models.Architecture) -> Counter:
    """Counts with the encoder of one of our own models."""
    encoder = PageEncoder(models.random_model(1, architecture).model, "")

    def count(sizes: Sequence[Size]) -> Count:
        files = [io.BytesIO() for _ in sizes]
        for size, file in zip(sizes, files, strict=True):
            Pillow.new("L", size).save(file, "PNG", compress_level=1)
        with torch.inference_mode():
            rows = encoder.encode([encoder.preprocess(file.getvalue(), len(sizes)) for file in files])
        return Count(*[sum(len(row) for row in rows)] * 2)

    return count


@dataclass(frozen=True, slots=True)
class MarkedRule:
    """The rule of a family that writes markers around the placeholders of an image's tiles."""

    config: VlmConfig
    tokenizer: Any

    def count(self, width_px: int, height_px: int, *, images: int = 1) -> ImageTokens:
        return self.config.token_rule.count(width_px, height_px, images=images)

    def markers(self, images: Sequence[ImageTokens]) -> int:
        prompts = [self.config.image_prompt(EmbeddingShape(i.placeholders, columns=i.columns)) for i in images]
        text = "".join(part if isinstance(part, str) else _WORDS[0] * part for prompt in prompts for part in prompt)
        return len(self.tokenizer(text)["input_ids"]) - sum(image.placeholders for image in images)


_SHIPPED: Final = {
    "llava-onevision": ("llava-onevision-7b",),
    "internvl": ("internvl3-8b",),
    "smolvlm": ("smolvlm-2.2b", "smolvlm2-2.2b"),
    "smolvlm-500m": ("smolvlm2-500m",),
    "llama-3.2-vision": ("llama-3.2-vision-11b",),
}


def rules_of(family: str) -> tuple[ImageTokenRule, ...]:
    """The published rule, and those of the models that we serve."""
    configs = [CONFIGS[shipped]("published") for shipped in _SHIPPED.get(family, ())]
    served = (MarkedRule(config, _tokenizer()) if config.marks_tiles else config.token_rule for config in configs)
    return RULES[family], *served


def predicted(rule: ImageTokenRule, sizes: Sequence[Size]) -> Count:
    images = [rule.count(*size, images=len(sizes)) for size in sizes]
    markers = rule.markers(images) if isinstance(rule, MarkedRule) else 0
    return Count(sum(image.placeholders for image in images), sum(image.encoded for image in images), markers)


def differences(
    counter: Counter, rules: Sequence[ImageTokenRule], prompts: Sequence[Sequence[Size]]
) -> list[Sequence[Size]]:
    """The prompts of which a rule predicts another count; only rules with markers predict those."""
    counts = [(sizes, counter(sizes)) for sizes in prompts]
    return [
        sizes
        for sizes, count in counts
        for rule in rules
        if predicted(rule, sizes)
        != (count if isinstance(rule, MarkedRule) else Count(count.placeholders, count.encoded))
    ]


def prompts_of(count: int) -> list[Sequence[Size]]:
    """Random sizes, each alone, and each two in one prompt; the same each time."""
    drawn = np.random.default_rng(SEED).integers(LEAST_PX, MOST_PX, (count, 2))
    sizes = [(int(width), int(height)) for width, height in drawn]
    return [*((size,) for size in sizes), *zip(sizes[::2], sizes[1::2], strict=True)]


@pytest.fixture(params=[2, pytest.param(1000, marks=pytest.mark.conformance)])
def prompts(request: pytest.FixtureRequest) -> list[Sequence[Size]]:
    return prompts_of(request.param)


@pytest.mark.parametrize("family", RULES)
def test_predicted_tokens_equal_those_of_the_processor(family: str, prompts: list[Sequence[Size]]) -> None:
    assert differences(processor_counter(family), rules_of(family), prompts) == []


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_predicted_tokens_equal_those_of_our_encoder(
    architecture: models.Architecture, prompts: list[Sequence[Size]]
) -> None:
    assert differences(encoder_counter(architecture), [PageEncoder.token_rule], prompts) == []


def placeholders(processor: Any, size: tuple[int, int], edge: int) -> int:
    """Image tokens that a processor puts in a prompt for one image, from tiles of `edge` x `edge` pixels."""
    tiles = np.zeros((1, 1, 3, edge, edge), dtype=np.uint8)
    inputs = {"batch_num_images": [1], "image_sizes": [size], "pixel_values": tiles}
    return int(processor.replace_image_token(inputs, 0).count("<image>"))


@pytest.mark.parametrize(
    ("family", "encoded"), [("llama-3.2-vision", 6404), ("llava-onevision", 7290), ("internvl", 1280)]
)
def test_token_counts_match_the_paper(family, encoded):
    assert RULES[family].count(896, 896).encoded == encoded


def test_mllama_canvas_matches_its_processor():
    _transformers()
    module = import_module("transformers.models.mllama.image_processing_mllama")
    for most, tile, sizes in ((4, 560, SIZES), (6, 224, SIZES[:100])):
        rule = Canvas(tile, 100, most)
        for height, width in sizes:
            canvas = module.get_optimal_tiled_canvas(height, width, most, tile)
            counted = rule.count(width, height)
            assert (counted.rows * tile, counted.columns * tile) == tuple(map(int, canvas)), (height, width)
            assert (counted.encoded, counted.placeholders) == (100 * counted.tiles, 1)


def test_internvl_tiles_match_its_processor():
    processor = _processor("internvl")[0].image_processor
    for height, width in SIZES:
        tiles = processor.get_number_of_image_patches(height, width, {})
        assert RULES["internvl"].count(width, height).placeholders == 256 * tiles, (height, width)
        few = processor.get_number_of_image_patches(height, width, {"min_patches": 2, "max_patches": 6})
        assert NearestGrid(448, 256, max_tiles=6, min_tiles=2).count(width, height).tiles == few, (height, width)


@pytest.mark.parametrize(("family", "edge"), [("llava-onevision", 384), ("llava-next", 336)])
def test_llava_placeholders_match_their_processor(family, edge):
    processor, _ = _processor(family)
    wanted = [placeholders(processor, size, edge) for size in SIZES]
    assert [RULES[family].count(width, height).placeholders for height, width in SIZES] == wanted


def test_image_without_area_is_rejected():
    for rule in RULES.values():
        with pytest.raises(ValueError, match="both sides must be at least 1"):
            rule.count(0, 5)
        with pytest.raises(ValueError, match="0 images"):
            rule.count(5, 5, images=0)
