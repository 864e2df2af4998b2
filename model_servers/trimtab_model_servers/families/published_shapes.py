"""How large published multimodal models are, and how each takes images, on transformers' own classes.

Sizes are those of the models' configurations on the hub: lmms-lab's LLaVA-OneVision-7B, OpenGVLab's InternVL3-8B and
Meta's Llama 3.2 11B Vision.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Literal

import torch
from torch import Tensor

from trimtab_pipelines.image_tokens import AnyResolution, Canvas, ImageTokenRule, NearestGrid

TRANSFORMERS: Any = import_module("transformers")  # not by name: its own types take mypy minutes
_MLLAMA: Any = import_module("transformers.models.mllama.configuration_mllama")
_LOUD: Final[dict[str, Any]] = {"initializer_range": 0.2}
"""How far the random weights of a tiny model spread: at the published 0.02 it says the same whatever it is asked."""
_IMAGENET: Final = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}

Size = Literal["published", "tiny"]


@dataclass(frozen=True, slots=True)
class Template:
    """How a chat is written: what begins it, a turn's opening and end, and what stands around an image.

    Attributes:
        behind_images: what stands behind a turn's images where they all come before its words, as the model learnt it;
            None where images stand among the words.
    """

    begin: str
    opening: str
    closing: str
    image: tuple[str, str]
    behind_images: str | None = None

    def opened(self, role: str) -> str:
        """What begins a turn of a role."""
        return self.opening.format(role=role)


_CHATML: Final = ("<|im_start|>{role}\n", "<|im_end|>\n")


@dataclass(frozen=True, slots=True)
class Shape:
    """One model: how it is made, spoken to, and shown images.

    Attributes:
        config: makes its configuration.
        kind: its class.
        tile_px: side of a tile.
        processor: makes its image processor.
        encode: maps what the processor gives of one image, and whether it is its chat's only one, to [rows, width].
        rule: how many tokens an image is.
        template: how a chat is written.
        image_id: the id of a placeholder.
        most_rows: rows of every image's embeddings, padding behind, in a model that attends across; None in others.
        alone_only: only an image that is alone in its chat is cut into tiles.
    """

    config: Callable[[], Any]
    kind: Any
    tile_px: int
    processor: Callable[[], Any]
    encode: Callable[[Any, Mapping[str, Tensor], bool], Tensor]
    rule: ImageTokenRule
    template: Template
    image_id: int
    most_rows: int | None = None
    alone_only: bool = False

    def model(self) -> Any:
        """The model, weights random."""
        return self.kind(self.config())


def qwen2(size: Size) -> Any:
    """The configuration of the text model that LLaVA-OneVision-7B and InternVL3-8B have in common, Qwen2-7B's."""
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 320} | _LOUD
    large = {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "vocab_size": 152_064}
    heads = {"num_attention_heads": 28, "num_key_value_heads": 4} if size == "published" else _FEW_HEADS
    return TRANSFORMERS.Qwen2Config(**(large if size == "published" else small), **heads, eos_token_id=0)


_FEW_HEADS: Final = {"num_attention_heads": 4, "num_key_value_heads": 2}


def llava_onevision(size: Size) -> Shape:
    """LLaVA-OneVision-7B: a SigLIP of 384 pixels, up to 6 x 6 tiles, unpadded."""
    tile, side, image_id = (384, 27, 151_646) if size == "published" else (28, 2, 300)
    grid = [[tile * rows, tile * columns] for rows in range(1, 7) for columns in range(1, 7)]
    large = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26, "num_attention_heads": 16}
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = TRANSFORMERS.SiglipVisionConfig(
        **(large if size == "published" else small), image_size=tile, patch_size=14, vision_use_head=False
    )
    config = TRANSFORMERS.LlavaOnevisionConfig(
        text_config=qwen2(size),
        vision_config=vision,
        image_token_id=image_id,
        video_token_id=image_id + 1,
        image_grid_pinpoints=grid,
        vision_feature_layer=-1,
    )

    def encode(model: Any, inputs: Mapping[str, Tensor], alone: bool) -> Tensor:  # noqa: FBT001
        many = None if alone else torch.tensor([2])
        told = {name: inputs[name] for name in ("pixel_values", "image_sizes")}
        seen = model.get_image_features(**told, batch_num_images=many, return_dict=True)
        rows: Tensor = torch.cat(list(seen.pooler_output))
        return rows

    return Shape(
        lambda: deepcopy(config),
        TRANSFORMERS.LlavaOnevisionForConditionalGeneration,
        tile,
        lambda: TRANSFORMERS.LlavaOnevisionImageProcessor(
            size={"height": tile, "width": tile}, image_grid_pinpoints=grid
        ),
        encode,
        AnyResolution(tile, side, tuple((one, other) for one, other in grid), most_tiles=9, alone_only=True),
        Template("", *_CHATML, ("", ""), behind_images="\n"),
        image_id,
        alone_only=True,
    )


def internvl(size: Size) -> Shape:
    """InternVL3-8B: an InternViT-300M of 448 pixels, up to 12 tiles and an overview, four patches a token."""
    tile, image_id = (448, 151_667) if size == "published" else (56, 300)
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = TRANSFORMERS.InternVLVisionConfig(**({} if size == "published" else small), image_size=tile)
    tokens = (tile // 28) ** 2
    config = TRANSFORMERS.InternVLConfig(
        text_config=qwen2(size),
        vision_config=vision,
        image_token_id=image_id,
        image_seq_length=tokens,
        tie_word_embeddings=False,
    )

    def encode(model: Any, inputs: Mapping[str, Tensor], alone: bool) -> Tensor:  # noqa: FBT001
        del alone
        seen = model.get_image_features(pixel_values=inputs["pixel_values"], return_dict=True).pooler_output
        rows: Tensor = seen.flatten(0, 1)
        return rows

    return Shape(
        lambda: deepcopy(config),
        TRANSFORMERS.InternVLForConditionalGeneration,
        tile,
        lambda: TRANSFORMERS.GotOcr2ImageProcessor(
            size={"height": tile, "width": tile}, crop_to_patches=True, min_patches=1, max_patches=12, **_IMAGENET
        ),
        encode,
        NearestGrid(tile, tokens, most_tiles=12),
        Template("", *_CHATML, ("<img>", "</img>\n")),
        image_id,
    )


def llama_vision(size: Size) -> Shape:
    """Llama 3.2 11B Vision: a ViT of 560 pixels, up to 4 tiles, attended to by 8 of 40 layers."""
    tile, tiles, image_id = (560, 4, 128_256) if size == "published" else (28, 4, 300)
    few: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 304}
    few |= _FEW_HEADS | _LOUD | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    text = _MLLAMA.MllamaTextConfig(**({} if size == "published" else few | {"cross_attention_layers": [1]}))
    small = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 2,
        "intermediate_layers_indices": [0],
        "vision_output_dim": 64,
    }
    vision = _MLLAMA.MllamaVisionConfig(
        **({} if size == "published" else small), image_size=tile, patch_size=14, max_num_tiles=tiles
    )
    config = TRANSFORMERS.MllamaConfig(text_config=text, vision_config=vision, image_token_index=image_id)
    tokens = (tile // 14) ** 2 + 1

    def encode(model: Any, inputs: Mapping[str, Tensor], alone: bool) -> Tensor:  # noqa: FBT001
        del alone
        told = {name: inputs[name] for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")}
        seen = model.model.vision_model(**told).last_hidden_state
        rows: Tensor = model.model.multi_modal_projector(seen).reshape(-1, text.hidden_size)
        return rows

    return Shape(
        lambda: deepcopy(config),
        TRANSFORMERS.MllamaForConditionalGeneration,
        tile,
        lambda: TRANSFORMERS.MllamaImageProcessor(size={"height": tile, "width": tile}, max_image_tiles=tiles),
        encode,
        Canvas(tile, tokens, most_tiles=tiles),
        Template("<|begin_of_text|>", "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", ("", "")),
        image_id,
        most_rows=tiles * tokens,
    )


SHAPES: Final[Mapping[str, Callable[[Size], Shape]]] = {
    "llava-onevision-7b": llava_onevision,
    "internvl3-8b": internvl,
    "llama-3.2-vision-11b": llama_vision,
}
