"""How large published multimodal models are, and how each takes images, on transformers' own classes.

Sizes are those of the models' configurations on the hub: lmms-lab's LLaVA-OneVision-7B, OpenGVLab's InternVL3-8B,
HuggingFaceTB's SmolVLM (2.2B) and SmolVLM2 (2.2B and 500M) and Meta's Llama 3.2 11B Vision.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final, Literal

import torch
from torch import Tensor

from trimtab_model_servers.chat.interfaces import Rows
from trimtab_model_servers.families import builtin_chat_templates
from trimtab_model_servers.families.builtin_chat_templates import Around
from trimtab_model_servers.families.hf_image_processor import Images, scaled
from trimtab_pipelines.image_tokens import AnyResolution, Canvas, ImageTokenRule, NearestGrid, Splits

TRANSFORMERS: Any = import_module("transformers")  # not by name: its own types take mypy minutes
_MLLAMA: Any = import_module("transformers.models.mllama.configuration_mllama")
_LOUD: Final[dict[str, Any]] = {"initializer_range": 0.2}
"""How far the random weights of a tiny model spread: at the published 0.02 it says the same whatever it is asked."""

Size = Literal["published", "tiny"]


@dataclass(frozen=True, slots=True)
class VlmConfig:
    """One model: how it is made, spoken to, and shown images.

    Attributes:
        config: makes its configuration.
        kind: its class.
        tile_px: side of a tile.
        images: how images are prepared for it.
        encode: maps what the processor gives of one image, and whether it is its chat's only one, to [rows, width].
        rule: how many tokens an image is.
        template: how a chat is written, in Jinja, where a stored model brings no template of its own.
        image_mark: what stands for an image in it.
        around: what an image of some rows is in a prompt; raises ValueError where none has such rows.
        image_id: the id of a placeholder.
        most_rows: rows of every image's embeddings, padding behind, in a model that attends across; None in others.
        single_image_only: only an image that is alone in its chat is cut into tiles.
        tells_tiles: a prompt tells the row and the column of each tile.
        decoder: what the model's class calls the part that writes.
    """

    config: Callable[[], Any]
    kind: Any
    tile_px: int
    images: Images
    encode: Callable[[Any, Mapping[str, Tensor], bool], Tensor]
    rule: ImageTokenRule
    template: str
    image_mark: str
    around: Callable[[Rows], Around]
    image_id: int
    most_rows: int | None = None
    single_image_only: bool = False
    tells_tiles: bool = False
    decoder: str = "language_model"

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


def llava_onevision(size: Size) -> VlmConfig:
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

    return VlmConfig(
        lambda: deepcopy(config),
        TRANSFORMERS.LlavaOnevisionForConditionalGeneration,
        tile,
        Images(
            TRANSFORMERS.LlavaOnevisionImageProcessor,
            {"size": {"height": tile, "width": tile}, "image_grid_pinpoints": grid},
            scaled("Half"),
        ),
        encode,
        AnyResolution(tile, side, tuple((one, other) for one, other in grid), max_tiles=9, single_image_only=True),
        builtin_chat_templates.LLAVA_ONEVISION,
        "<image>",
        builtin_chat_templates.plain,
        image_id,
        single_image_only=True,
    )


def internvl(size: Size) -> VlmConfig:
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

    return VlmConfig(
        lambda: deepcopy(config),
        TRANSFORMERS.InternVLForConditionalGeneration,
        tile,
        Images(
            TRANSFORMERS.GotOcr2ImageProcessor,
            {"size": {"height": tile, "width": tile}, "min_patches": 1, "max_patches": 12},
            {**scaled("ImageNet"), "crop_to_patches": True},
        ),
        encode,
        NearestGrid(tile, tokens, max_tiles=12),
        builtin_chat_templates.INTERNVL,
        "<IMG_CONTEXT>",
        builtin_chat_templates.bracketed,
        image_id,
    )


def llama_vision(size: Size) -> VlmConfig:
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

    return VlmConfig(
        lambda: deepcopy(config),
        TRANSFORMERS.MllamaForConditionalGeneration,
        tile,
        Images(
            TRANSFORMERS.MllamaImageProcessor,
            {"size": {"height": tile, "width": tile}, "max_image_tiles": tiles},
            scaled("CLIP"),
        ),
        encode,
        Canvas(tile, tokens, max_tiles=tiles),
        builtin_chat_templates.LLAMA_VISION,
        "<|image|>",
        builtin_chat_templates.attended_apart,
        image_id,
        most_rows=tiles * tokens,
    )


@dataclass(frozen=True, slots=True)
class _Smol:
    """What SmolVLM's models differ in: whose classes they are, and the published sizes.

    Attributes:
        named: how transformers' classes of this architecture begin.
        image_id: the id of a placeholder.
        vocabulary: of the text model.
        tile_px: side of a tile; an image is scaled to four of them.
        patch_px: side of a patch.
        scale: so many patches a side become one token.
        text: sizes of the text model.
        vision: sizes of the tower.
    """

    named: str
    image_id: int
    vocabulary: int
    tile_px: int
    patch_px: int
    scale: int
    text: Mapping[str, Any]
    vision: Mapping[str, int]


_SMOLLM_1_7B: Final = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
_SMOLLM_360M: Final = {
    "hidden_size": 960,
    "intermediate_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
    "head_dim": 64,
}
_SIGLIP_400M: Final = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
}
_SIGLIP_93M: Final = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_SMOLVLM: Final = _Smol("Idefics3", 49_153, 49_155, 384, 14, 3, _SMOLLM_1_7B, _SIGLIP_400M)
_SMOLVLM2: Final = _Smol("SmolVLM", 49_190, 49_280, 384, 14, 3, _SMOLLM_1_7B, _SIGLIP_400M)
_SMOLVLM2_500M: Final = _Smol("SmolVLM", 49_190, 49_280, 512, 16, 4, _SMOLLM_360M, _SIGLIP_93M)


def smolvlm(model: _Smol, size: Size) -> VlmConfig:
    """SmolVLM: a SigLIP, tiles of an image scaled to a longest side and an overview, several patches a token."""
    published = size == "published"
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2} | _FEW_HEADS | _LOUD
    seen = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tile, patch, scale, sides = (model.tile_px, model.patch_px, model.scale, 4) if published else (28, 7, 2, 3)
    text = TRANSFORMERS.LlamaConfig(
        **(model.text if published else small),
        vocab_size=model.vocabulary if published else 320,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    vision = getattr(TRANSFORMERS, f"{model.named}VisionConfig")(
        **(model.vision if published else seen), image_size=tile, patch_size=patch
    )
    image_id = model.image_id if published else 300
    config = getattr(TRANSFORMERS, f"{model.named}Config")(
        text_config=text, vision_config=vision, image_token_id=image_id, scale_factor=scale, tie_word_embeddings=False
    )
    tokens = (tile // patch // scale) ** 2

    def encode(model: Any, inputs: Mapping[str, Tensor], alone: bool) -> Tensor:  # noqa: FBT001
        del alone
        told = {name: inputs[name] for name in ("pixel_values", "pixel_attention_mask")}
        rows: Tensor = torch.cat(list(model.get_image_features(**told, return_dict=True).pooler_output))
        return rows

    return VlmConfig(
        lambda: deepcopy(config),
        getattr(TRANSFORMERS, f"{model.named}ForConditionalGeneration"),
        tile,
        Images(
            getattr(TRANSFORMERS, f"{model.named}ImageProcessor"),
            {"size": {"longest_edge": sides * tile}, "max_image_size": {"longest_edge": tile}},
            scaled("Half"),
        ),
        encode,
        Splits(tile, tokens, longest_px=sides * tile),
        builtin_chat_templates.SMOLVLM,
        "<image>",
        partial(builtin_chat_templates.in_tiles, tile_tokens=tokens),
        image_id,
        tells_tiles=True,
        decoder="text_model",
    )


SHAPES: Final[Mapping[str, Callable[[Size], VlmConfig]]] = {
    "llava-onevision-7b": llava_onevision,
    "internvl3-8b": internvl,
    "smolvlm-2.2b": partial(smolvlm, _SMOLVLM),
    "smolvlm2-2.2b": partial(smolvlm, _SMOLVLM2),
    "smolvlm2-500m": partial(smolvlm, _SMOLVLM2_500M),
    "llama-3.2-vision-11b": llama_vision,
}
