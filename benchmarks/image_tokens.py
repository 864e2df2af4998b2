"""``make bench NAME=image-tokens``: image tokens predicted from sizes against each model's own processor.

Processors are transformers' own classes with the configurations of the models' pages on the hub, and are shown an image
of every size together with a prompt: its placeholders are counted, the tiles that would be encoded, and what a model
that tells rows and columns of tiles writes beside. The models of pipelines/lmm-digits encode theirs.
"""

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from PIL import Image as Pillow
from rich.progress import Progress
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from trimtab.options import console
from trimtab_model_servers.chat.interfaces import EmbeddingShape
from trimtab_model_servers.families.hf_vlm_configs import CONFIGS, VlmConfig
from trimtab_model_servers.families.lmm_digits import models
from trimtab_model_servers.families.lmm_digits.family import PageEncoder
from trimtab_pipelines.image_tokens import RULES, ImageTokenRule, ImageTokens
from trimtab_pipelines.result_line import ResultLine, threshold

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
    """Of one image, or of several in one prompt; marks are tokens that tell of tiles, where that is looked at."""

    placeholders: int
    encoded: int
    marks: int = 0


Size = tuple[int, int]
"""Width and height, px."""
Maker = Callable[[Sequence[Size]], Count]
"""What a model makes of images of these sizes in one prompt."""


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
    """A family's processor, and how many tokens its encoder makes of a tile."""
    t = _transformers()
    match family:
        case "llava-1.5":
            return t.LlavaProcessor(t.CLIPImageProcessor(**_clip(336)), _tokenizer(), **_PATCHES), 576
        case "llava-next":
            return t.LlavaNextProcessor(t.LlavaNextImageProcessor(**_clip(336)), _tokenizer(), **_PATCHES), 576
        case "llava-onevision":
            seeing = t.LlavaOnevisionImageProcessor(), _tokenizer(), t.LlavaOnevisionVideoProcessor()
            return t.LlavaOnevisionProcessor(*seeing, num_image_tokens=729, vision_feature_select_strategy="full"), 729
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


def by_processor(family: str) -> Maker:
    """What a published model's processor makes."""
    processor, tile_tokens = _processor(family)

    def made(sizes: Sequence[Size]) -> Count:
        shown = [np.full((height, width, 3), 255, dtype=np.uint8) for width, height in sizes]
        told = processor(images=[shown], text=processor.image_token * len(shown), return_tensors="pt")
        placeholders = int((told["input_ids"] == processor.image_token_id).sum())
        marks = told["input_ids"].numel() - placeholders if "rows" in told or "pixel_attention_mask" in told else 0
        tiles = told["pixel_values"].flatten(0, -4).flatten(1).any(dim=1)  # those that only fill up are all zeros
        return Count(placeholders, int(tiles.sum()) * tile_tokens, marks)

    return made


def by_encoder(architecture: models.Architecture) -> Maker:
    """What the tower of one of our own models makes; each row of a page stands behind a placeholder of its own."""
    reader = PageEncoder(models.random_model(1, architecture).model, "")

    def made(sizes: Sequence[Size]) -> Count:
        files = [io.BytesIO() for _ in sizes]
        for size, file in zip(sizes, files, strict=True):
            Pillow.new("L", size).save(file, "PNG", compress_level=1)
        with torch.inference_mode():
            rows = reader.encode([reader.preprocess(file.getvalue(), len(sizes)) for file in files])
        return Count(*[sum(len(one) for one in rows)] * 2)

    return made


@dataclass(frozen=True, slots=True)
class Spelled:
    """A family's rule, and what it writes around the placeholders of an image's tiles."""

    shape: VlmConfig
    tokenizer: Any

    def count(self, width_px: int, height_px: int, *, images: int = 1) -> ImageTokens:
        """Count one image."""
        return self.shape.token_rule.count(width_px, height_px, images=images)

    def marks(self, each: Sequence[ImageTokens]) -> int:
        """Count the marks of a prompt's images."""
        around = [self.shape.image_prompt(EmbeddingShape(one.placeholders, columns=one.columns)) for one in each]
        text = "".join(part if isinstance(part, str) else _WORDS[0] * part for parts in around for part in parts)
        return len(self.tokenizer(text)["input_ids"]) - sum(one.placeholders for one in each)


def counted(rule: ImageTokenRule, sizes: Sequence[Size]) -> Count:
    """What a rule tells."""
    each = [rule.count(*size, images=len(sizes)) for size in sizes]
    marks = rule.marks(each) if isinstance(rule, Spelled) else 0
    return Count(sum(one.placeholders for one in each), sum(one.encoded for one in each), marks)


_SHIPPED: Final = {
    "llava-onevision": ("llava-onevision-7b",),
    "internvl": ("internvl3-8b",),
    "smolvlm": ("smolvlm-2.2b", "smolvlm2-2.2b"),
    "smolvlm-500m": ("smolvlm2-500m",),
    "llama-3.2-vision": ("llama-3.2-vision-11b",),
}


def families() -> dict[str, tuple[Callable[[], Maker], tuple[ImageTokenRule, ...]]]:
    """Who makes, and the rules that should tell the same: the published one, and that of the family we serve."""
    told: dict[str, tuple[Callable[[], Maker], tuple[ImageTokenRule, ...]]] = {
        f"lmm-digits {kind}": (lambda kind=kind: by_encoder(kind), (PageEncoder.token_rule,))  # type: ignore[misc]
        for kind in models.ARCHITECTURES
    }
    for name, rule in RULES.items():
        shapes = [CONFIGS[shipped]("published") for shipped in _SHIPPED.get(name, ())]
        served = (Spelled(shape, _tokenizer()) if shape.marks_tiles else shape.token_rule for shape in shapes)
        told[name] = (lambda name=name: by_processor(name), (rule, *served))  # type: ignore[misc]
    return told


def drawn(count: int) -> list[Size]:
    """Random sizes, the same each time."""
    return [(int(w), int(h)) for w, h in np.random.default_rng(SEED).integers(LEAST_PX, MOST_PX, (count, 2))]


def differences(made: Maker, rules: Sequence[ImageTokenRule], shown: Sequence[Sequence[Size]]) -> int:
    """How many of these prompts' images are told otherwise than they are made."""
    return sum(any(_otherwise(rule, sizes, count) for rule in rules) for sizes in shown for count in (made(sizes),))


def _otherwise(rule: ImageTokenRule, sizes: Sequence[Size], made: Count) -> bool:
    """Whether a rule tells otherwise, marks included where it tells them."""
    told = counted(rule, sizes)
    return told != (made if isinstance(rule, Spelled) else made._replace(marks=0))


def main() -> int:
    """Compare and print the verdict."""
    parser = argparse.ArgumentParser(description="Image tokens by size, beside each model's own processor.")
    parser.add_argument("--sizes", type=int, default=1_000, help="random sizes of each family (default 1000)")
    count = parser.parse_args().sizes
    sizes, bars = drawn(count), []
    pairs = list(zip(sizes[::2], sizes[1::2], strict=False))
    with Progress(console=console, transient=True) as progress:
        for name, (maker, rules) in progress.track(families().items()):
            made = maker()
            for manner, shown in (("alone", [(size,) for size in sizes]), ("two a prompt", pairs)):
                bars.append(threshold(f"{name}, {manner}: told otherwise", differences(made, rules, shown), "==", 0))
    figures = {"sizes": len(sizes), "pairs": len(pairs), "transformers": _transformers().__version__}
    outcome = ResultLine(name="image-tokens", figures=figures, bars=tuple(bars))
    outcome.print()
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    sys.exit(main())
