"""Image token counts by size, equal to those of the model's processor in transformers."""

import os
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from trimtab_pipelines.image_tokens import RULES, Canvas, NearestGrid

os.environ.setdefault("HF_HUB_OFFLINE", "1")
EDGES = [
    *((1, 1), (1, 2999), (2999, 1), (7, 5000), (900, 451)),
    *((side, side) for side in (336, 384, 448, 560, 896, 1120, 2304)),
    *((672, 336), (448, 896), (1120, 560)),
]
SIZES = [(int(height), int(width)) for height, width in np.random.default_rng(3).integers(1, 3000, (985, 2))] + EDGES
"""(height, width), 1,000 of them."""


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer(transformers) -> Any:
    from tokenizers import Tokenizer, models  # noqa: PLC0415  (comes with transformers)

    own = Tokenizer(models.WordLevel({"<unk>": 0, "<image>": 1, "<video>": 2}, unk_token="<unk>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>")


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


def test_mllama_canvas_matches_its_processor(transformers):
    module = import_module("transformers.models.mllama.image_processing_mllama")
    for most, tile, sizes in ((4, 560, SIZES), (6, 224, SIZES[:100])):
        rule = Canvas(tile, 100, most)
        for height, width in sizes:
            canvas = module.get_optimal_tiled_canvas(height, width, most, tile)
            counted = rule.count(width, height)
            assert (counted.rows * tile, counted.columns * tile) == tuple(map(int, canvas)), (height, width)
            assert (counted.encoded, counted.placeholders) == (100 * counted.tiles, 1)


def test_internvl_tiles_match_its_processor(transformers):
    processor = transformers.GotOcr2ImageProcessor(
        size={"height": 448, "width": 448}, crop_to_patches=True, min_patches=1, max_patches=12
    )
    for height, width in SIZES:
        tiles = processor.get_number_of_image_patches(height, width, {})
        assert RULES["internvl"].count(width, height).placeholders == 256 * tiles, (height, width)
        few = processor.get_number_of_image_patches(height, width, {"min_patches": 2, "max_patches": 6})
        assert NearestGrid(448, 256, max_tiles=6, min_tiles=2).count(width, height).tiles == few, (height, width)


def test_llava_placeholders_match_their_processors(transformers, tokenizer):
    onevision = transformers.LlavaOnevisionProcessor(
        transformers.LlavaOnevisionImageProcessor(),
        tokenizer,
        transformers.LlavaOnevisionVideoProcessor(),
        num_image_tokens=729,
    )
    crop = {"height": 336, "width": 336}
    following = transformers.LlavaNextProcessor(
        transformers.LlavaNextImageProcessor(size={"shortest_edge": 336}, crop_size=crop),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    for family, processor, edge in (("llava-onevision", onevision, 384), ("llava-next", following, 336)):
        wanted = [placeholders(processor, size, edge=edge) for size in SIZES]
        assert [RULES[family].count(width, height).placeholders for height, width in SIZES] == wanted, family


def test_image_without_area_is_rejected():
    for rule in RULES.values():
        with pytest.raises(ValueError, match="both sides must be at least 1"):
            rule.count(0, 5)
        with pytest.raises(ValueError, match="0 images"):
            rule.count(5, 5, images=0)
