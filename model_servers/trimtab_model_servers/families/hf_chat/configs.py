"""Configurations of pretrained multimodal models: sizes and image handling, on transformers' own classes.

Sizes are those of the models' configurations on the Hugging Face Hub: lmms-lab's LLaVA-OneVision-7B, OpenGVLab's
InternVL3-8B, HuggingFaceTB's SmolVLM (2.2B) and SmolVLM2 (2.2B and 500M) and Meta's Llama 3.2 11B Vision.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from trimtab_model_servers.chat.interfaces import EmbeddingShape
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.hf_chat import builtin_templates
from trimtab_model_servers.families.hf_chat.builtin_templates import ImagePrompt
from trimtab_model_servers.families.hf_chat.image_processor import ImageProcessing, normalization
from trimtab_pipelines.image_tokens import AnyResolution, Canvas, ImageTokenRule, NearestGrid, Splits

TRANSFORMERS: Any = import_module("transformers")  # by name: checking its types takes mypy minutes
_MLLAMA: Any = import_module("transformers.models.mllama.configuration_mllama")
_LARGE_INIT: Final[dict[str, Any]] = {"initializer_range": 0.2}
"""Spread of a tiny model's random weights: at the default of 0.02 its output does not depend on its input."""
_TINY_HEADS: Final = {"num_attention_heads": 4, "num_key_value_heads": 2}


def _widths(*sizes: int) -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return dict(zip(names, sizes, strict=True))


_TINY_TOWER: Final = _widths(32, 32, 2, 2)

Size = Literal["published", "tiny"]
Kind = tuple[str, int | None, int | None]
"""What determines the image tokens of a model: its type, the id of a placeholder, and a tile's side in pixels."""


@dataclass(frozen=True, slots=True)
class VlmConfig:
    """One model: its classes, chat template and image handling."""

    config: Callable[[], Any]
    model_class: Any
    tile_px: int
    image_processing: ImageProcessing
    encode: Callable[[Any, Mapping[str, Tensor], bool], Tensor]
    """Encodes a processed image to [rows, width]; the flag says whether the image is alone in its chat."""
    token_rule: ImageTokenRule
    template: str
    """Chat template in Jinja, used if the model's folder has none."""
    image_mark: str
    """Text that stands for an image in the template's output."""
    image_prompt: Callable[[EmbeddingShape], ImagePrompt]
    """Prompt of an image; raises ValueError if no image has embeddings of the shape."""
    image_id: int
    """Token id of a placeholder."""
    padded_rows: int | None = None
    """Rows of every image's embeddings with padding, with cross-attention; None in other models."""
    tiles_single_image_only: bool = False
    """Only an image that is alone in its chat is split into tiles."""
    marks_tiles: bool = False
    """The prompt marks the row and column of each tile."""
    decoder: str = "language_model"
    """Name of the decoder within the model's class."""

    @property
    def kind(self) -> Kind:
        return self.model_class.config_class.model_type, self.image_id, self.tile_px

    def model(self) -> Any:
        return self.model_class(self.config())


def qwen2(size: Size) -> Any:
    """Configuration of Qwen2-7B, the decoder of LLaVA-OneVision-7B and InternVL3-8B."""
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 320} | _LARGE_INIT
    large = {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "vocab_size": 152_064}
    heads = {"num_attention_heads": 28, "num_key_value_heads": 4} if size == "published" else _TINY_HEADS
    return TRANSFORMERS.Qwen2Config(**(large if size == "published" else small), **heads, eos_token_id=0)


def llava_onevision(size: Size) -> VlmConfig:
    """LLaVA-OneVision-7B: SigLIP of 384 pixels, up to 6 x 6 tiles, unpadded."""
    tile, side, image_id = (384, 27, 151_646) if size == "published" else (28, 2, 300)
    grid = [[tile * rows, tile * columns] for rows in range(1, 7) for columns in range(1, 7)]
    large = _widths(1152, 4304, 26, 16)
    vision = TRANSFORMERS.SiglipVisionConfig(
        **(large if size == "published" else _TINY_TOWER), image_size=tile, patch_size=14, vision_use_head=False
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
        arguments = {name: inputs[name] for name in ("pixel_values", "image_sizes")}
        arguments |= {} if alone else {"batch_num_images": torch.tensor([2])}
        return torch.cat(list(model.get_image_features(**arguments, return_dict=True).pooler_output))

    return VlmConfig(
        lambda: deepcopy(config),
        TRANSFORMERS.LlavaOnevisionForConditionalGeneration,
        tile,
        ImageProcessing(
            TRANSFORMERS.LlavaOnevisionImageProcessor,
            {"size": {"height": tile, "width": tile}, "image_grid_pinpoints": grid},
            normalization("Half"),
        ),
        encode,
        AnyResolution(
            tile, side, tuple((height, width) for height, width in grid), max_tiles=9, single_image_only=True
        ),
        builtin_templates.LLAVA_ONEVISION,
        "<image>",
        builtin_templates.plain,
        image_id,
        tiles_single_image_only=True,
    )


def internvl(size: Size) -> VlmConfig:
    """InternVL3-8B: InternViT-300M of 448 pixels, up to 12 tiles and a thumbnail, four patches per token."""
    tile, image_id = (448, 151_667) if size == "published" else (56, 300)
    vision = TRANSFORMERS.InternVLVisionConfig(**({} if size == "published" else _TINY_TOWER), image_size=tile)
    tokens = (tile // 28) ** 2
    config = TRANSFORMERS.InternVLConfig(
        text_config=qwen2(size),
        vision_config=vision,
        image_token_id=image_id,
        image_seq_length=tokens,
        tie_word_embeddings=False,
    )

    def encode(model: Any, inputs: Mapping[str, Tensor], _: bool) -> Any:  # noqa: FBT001
        return model.get_image_features(pixel_values=inputs["pixel_values"], return_dict=True).pooler_output.flatten(
            0, 1
        )

    return VlmConfig(
        lambda: deepcopy(config),
        TRANSFORMERS.InternVLForConditionalGeneration,
        tile,
        ImageProcessing(
            TRANSFORMERS.GotOcr2ImageProcessor,
            {"size": {"height": tile, "width": tile}, "min_patches": 1, "max_patches": 12},
            {**normalization("ImageNet"), "crop_to_patches": True},
        ),
        encode,
        NearestGrid(tile, tokens, max_tiles=12),
        builtin_templates.INTERNVL,
        "<IMG_CONTEXT>",
        builtin_templates.bracketed,
        image_id,
    )


def llama_vision(size: Size) -> VlmConfig:
    """Llama 3.2 11B Vision: ViT of 560 pixels, up to 4 tiles, cross-attention in 8 of 40 layers."""
    tile, tiles, image_id = (560, 4, 128_256) if size == "published" else (28, 4, 300)
    tiny: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 304}
    tiny |= _TINY_HEADS | _LARGE_INIT | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    text = _MLLAMA.MllamaTextConfig(**({} if size == "published" else tiny | {"cross_attention_layers": [1]}))
    layers = {"num_hidden_layers": 2, "num_global_layers": 1, "intermediate_layers_indices": [0]}
    small = layers | {"hidden_size": 32, "intermediate_size": 32, "attention_heads": 2, "vision_output_dim": 64}
    vision = _MLLAMA.MllamaVisionConfig(
        **({} if size == "published" else small), image_size=tile, patch_size=14, max_num_tiles=tiles
    )
    config = TRANSFORMERS.MllamaConfig(text_config=text, vision_config=vision, image_token_index=image_id)
    tokens = (tile // 14) ** 2 + 1

    def encode(model: Any, inputs: Mapping[str, Tensor], _: bool) -> Any:  # noqa: FBT001
        arguments = {name: inputs[name] for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")}
        features = model.model.vision_model(**arguments).last_hidden_state
        return model.model.multi_modal_projector(features).reshape(-1, text.hidden_size)

    return VlmConfig(
        lambda: deepcopy(config),
        TRANSFORMERS.MllamaForConditionalGeneration,
        tile,
        ImageProcessing(
            TRANSFORMERS.MllamaImageProcessor,
            {"size": {"height": tile, "width": tile}, "max_image_tiles": tiles},
            normalization("CLIP"),
        ),
        encode,
        Canvas(tile, tokens, max_tiles=tiles),
        builtin_templates.LLAMA_VISION,
        "<|image|>",
        builtin_templates.single_placeholder,
        image_id,
        padded_rows=tiles * tokens,
    )


_SMOLLM_1_7B: Final = _widths(2048, 8192, 24, 32) | {"num_key_value_heads": 32}
_SMOLLM_360M: Final = _widths(960, 2560, 32, 15) | {"num_key_value_heads": 5, "head_dim": 64}
_SIGLIP_400M: Final = _widths(1152, 4304, 27, 16)
_SIGLIP_93M: Final = _widths(768, 3072, 12, 12)


def smolvlm(
    classes: str,
    image_id: int,
    vocabulary: int,
    tile_patch_scale: tuple[int, int, int],
    sizes: tuple[Mapping[str, int], Mapping[str, int]],
    size: Size,
) -> VlmConfig:
    """SmolVLM: SigLIP, tiles of a resized image and a global view, several patches per token.

    ``classes`` is the prefix of transformers' classes. Tile and patch are sides in pixels; scale is the number of
    patches per side that become one token. ``sizes`` are those of the decoder and the vision tower.
    """
    published, (text, vision) = size == "published", sizes
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2} | _TINY_HEADS | _LARGE_INIT
    tile, patch, scale = tile_patch_scale if published else (28, 7, 2)
    longest = (4 if published else 3) * tile
    text_config = TRANSFORMERS.LlamaConfig(
        **(text if published else small),
        vocab_size=vocabulary if published else 320,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    vision_config = getattr(TRANSFORMERS, f"{classes}VisionConfig")(
        **(vision if published else _TINY_TOWER), image_size=tile, patch_size=patch
    )
    image_id = image_id if published else 300
    config = getattr(TRANSFORMERS, f"{classes}Config")(
        text_config=text_config,
        vision_config=vision_config,
        image_token_id=image_id,
        scale_factor=scale,
        tie_word_embeddings=False,
    )
    tokens = (tile // patch // scale) ** 2

    def encode(model: Any, inputs: Mapping[str, Tensor], _: bool) -> Tensor:  # noqa: FBT001
        arguments = {name: inputs[name] for name in ("pixel_values", "pixel_attention_mask")}
        return torch.cat(list(model.get_image_features(**arguments, return_dict=True).pooler_output))

    return VlmConfig(
        lambda: deepcopy(config),
        getattr(TRANSFORMERS, f"{classes}ForConditionalGeneration"),
        tile,
        ImageProcessing(
            getattr(TRANSFORMERS, f"{classes}ImageProcessor"),
            {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}},
            normalization("Half"),
        ),
        encode,
        Splits(tile, tokens, longest_px=longest),
        builtin_templates.SMOLVLM,
        "<image>",
        partial(builtin_templates.tiled, tile_tokens=tokens),
        image_id,
        marks_tiles=True,
        decoder="text_model",
    )


CONFIGS: Final[Mapping[str, Callable[[Size], VlmConfig]]] = {
    "llava-onevision-7b": llava_onevision,
    "internvl3-8b": internvl,
    "smolvlm-2.2b": partial(smolvlm, "Idefics3", 49_153, 49_155, (384, 14, 3), (_SMOLLM_1_7B, _SIGLIP_400M)),
    "smolvlm2-2.2b": partial(smolvlm, "SmolVLM", 49_190, 49_280, (384, 14, 3), (_SMOLLM_1_7B, _SIGLIP_400M)),
    "smolvlm2-500m": partial(smolvlm, "SmolVLM", 49_190, 49_280, (512, 16, 4), (_SMOLLM_360M, _SIGLIP_93M)),
    "llama-3.2-vision-11b": llama_vision,
}


def read_config(folder: Path) -> Any:
    """The configuration of a stored model; raises ModelError."""
    try:
        return TRANSFORMERS.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}: {' '.join(str(error).split())[:300]}") from error


def kind_of(config: Any) -> Kind:
    side = getattr(getattr(config, "vision_config", None), "image_size", None)
    tile_px = side[0] if isinstance(side, list | tuple) else side
    return config.model_type, getattr(config, "image_token_id", None), tile_px


def find_config(folder: Path) -> VlmConfig:
    """The configuration that handles images as a stored model does; ModelError if there is none."""
    stored = kind_of(read_config(folder))
    known = [create(size) for create in CONFIGS.values() for size in get_args(Size)]
    found = next((config for config in known if config.kind == stored), None)
    if found is None:
        types = ", ".join(sorted({config.kind[0] for config in known}))
        raise ModelError(
            f"{folder}: model_type, image token and image size are {stored}, which no family has; known types are "
            f"{types}. Serve other models with an engine such as vLLM"
        )
    return found
