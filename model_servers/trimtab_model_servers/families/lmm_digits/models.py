"""Models of lmm-digits: transformers' LLaVA and Mllama classes at a small size, with `VisionTower` as vision tower.

A weight file is one safetensors file in float16; its metadata holds the architecture and the tokenizer.
"""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.digits.layers import Convolution, Residual
from trimtab_model_servers.families.lmm_digits import CELLS
from trimtab_model_servers.families.lmm_digits.tokenizer import (
    SPECIAL,
    VOCABULARY,
    load_default_tokenizer,
    read_tokenizer,
)
from trimtab_model_servers.weights.files import sha256
from trimtab_model_servers.weights.loading import fuse_batch_norms, read_file, save_half, seeded

_OUTPUTS: Any = import_module("transformers.modeling_outputs")  # a plain import takes mypy minutes

TOKENS_A_SIDE: Final = 4
PAGE_TOKENS: Final = TOKENS_A_SIDE * TOKENS_A_SIDE
_TRANSFORMERS: Any = import_module("transformers")  # a plain import takes mypy minutes
_MLLAMA: Any = import_module("transformers.models.mllama.configuration_mllama")
Architecture = Literal["decoder-only", "cross-attention"]
ARCHITECTURES: Final[tuple[Architecture, ...]] = ("decoder-only", "cross-attention")
WIDTH: Final = 128
IMAGE_ID: Final = 4
END_ID: Final = 1
PAD_ID: Final = 0
"""Ids of special tokens: their indices in `tokenizer.SPECIAL`."""
_TEXT: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 352,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rope_theta": 10_000.0,
    "pad_token_id": PAD_ID,
    "bos_token_id": 2,
    "eos_token_id": END_ID,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
}


class VisionTower(nn.Module):
    """Encoder of a page to `PAGE_TOKENS` tokens, row by row."""

    num_patches: Final = PAGE_TOKENS
    """Read by Mllama."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            Convolution(1, 20, stride=2),
            Convolution(20, 32, stride=2),
            Residual(32),
            Convolution(32, 64, stride=2),
            Residual(64),
            Convolution(64, width, stride=3),
        )
        self.places = nn.Parameter(0.5 * torch.randn(PAGE_TOKENS, width))

    def features(self, pixels: Tensor) -> Tensor:
        """Map uint8 or float pages [N, 1, 96, 96] in 0…255 to features [N, 16, width], without position embeddings."""
        x = pixels.float()
        x = (x - x.mean(dim=(2, 3), keepdim=True)) / (x.std(dim=(2, 3), keepdim=True) + 8.0)
        maps: Tensor = self.stem(x.contiguous(memory_format=torch.channels_last))
        return maps.flatten(2).transpose(1, 2)

    def forward(self, pixel_values: Tensor, **options: Any) -> Any:
        """Encode pages [..., 1, 96, 96] to tokens [..., 16, width]; other arguments of vision towers are ignored."""
        del options
        leading = pixel_values.shape[:-3]
        tokens = self.features(pixel_values.reshape(-1, *pixel_values.shape[-3:])) + self.places
        tokens = tokens.reshape(*leading, *tokens.shape[1:])
        return _OUTPUTS.BaseModelOutputWithPooling(last_hidden_state=tokens, hidden_states=(tokens,))


def build(architecture: Architecture, *, seed: int) -> Any:
    """Build a `LlavaForConditionalGeneration` or a `MllamaForConditionalGeneration` with random weights."""
    with seeded(seed):
        model = _llava() if architecture == "decoder-only" else _mllama()
        init_similarity_heads(model)
    model.generation_config = _TRANSFORMERS.GenerationConfig(
        do_sample=False, eos_token_id=END_ID, pad_token_id=PAD_ID, bos_token_id=2
    )
    return model


def init_similarity_heads(model: Any) -> None:
    """Initialise one query head per key head with the weights of its keys, so that it attends to similar tokens.

    Presence questions need such a head; from random weights they take far longer to train than all others.
    """
    for layer in model.model.language_model.layers:
        attention = layer.cross_attn if hasattr(layer, "cross_attn") else layer.self_attn
        keys, size = _TEXT["num_key_value_heads"], WIDTH // _TEXT["num_attention_heads"]
        queries = attention.q_proj.weight.data.view(keys, -1, size, WIDTH)
        attention.k_proj.weight.data.copy_(queries[:, 0].reshape(keys * size, WIDTH))


def tower(model: Any) -> VisionTower:
    inner = model.model
    return cast("VisionTower", inner.vision_tower if hasattr(inner, "vision_tower") else inner.vision_model)


def placeholders(architecture: Architecture) -> int:
    """Number of placeholders of a page in the prompt; a register for each cell follows them."""
    return PAGE_TOKENS if architecture == "decoder-only" else 1


def prepare_for_serving(model: Any) -> Any:
    """Merge normalisations, switch to evaluation and freeze, in place."""
    fuse_batch_norms(tower(model))
    return model.eval().requires_grad_(requires_grad=False)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to serve, float32 and in evaluation mode."""

    model: Any
    architecture: Architecture
    tokenizer: Tokenizer
    name: str
    """Identifies the weights."""


def save(model: Any, architecture: Architecture, tokenizer: Tokenizer, path: Path, training: dict[str, str]) -> None:
    """Write a folded model as float16 with its tokenizer; `training` is added to the metadata."""
    metadata = {"family": "lmm-digits", "architecture": architecture, "tokenizer": tokenizer.to_str()}
    save_half(path, model.state_dict(), {**training, **metadata})


def random_model(seed: int, architecture: Architecture) -> LoadedModel:
    model = prepare_for_serving(build(architecture, seed=seed))
    return LoadedModel(model, architecture, load_default_tokenizer(), f"random-{architecture}-{seed}")


def load(path: Path) -> LoadedModel:
    """Load a model; raises ModelError if the file is no weight file of these models."""
    metadata, tensors = read_file(path)
    architecture = metadata.get("architecture")
    if metadata.get("family") != "lmm-digits" or architecture not in ARCHITECTURES:
        raise ModelError(f"{path}: expected family 'lmm-digits' and one of {ARCHITECTURES} in the metadata")
    try:
        model = prepare_for_serving(build(architecture, seed=0))
        model.load_state_dict(tensors)
        tokenizer = read_tokenizer(metadata.get("tokenizer", ""))
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"{path}: not weights of these models: {error}") from error
    return LoadedModel(model, architecture, tokenizer, sha256(path))


def _llava() -> Any:
    config = _TRANSFORMERS.LlavaConfig(
        text_config=_TRANSFORMERS.LlamaConfig(num_hidden_layers=4, **_TEXT),
        vision_config=_placeholder_vision_config(),
        image_token_id=IMAGE_ID,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_seq_length=PAGE_TOKENS,
        tie_word_embeddings=False,
    )
    model: Any = _TRANSFORMERS.LlavaForConditionalGeneration(config)
    model.model.vision_tower = VisionTower(WIDTH)
    return model


def _mllama() -> Any:
    text = _MLLAMA.MllamaTextConfig(
        num_hidden_layers=6,
        cross_attention_layers=[0, 3],
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        **{key: value for key, value in _TEXT.items() if key != "rope_theta"},
    )
    vision = _MLLAMA.MllamaVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_global_layers=1,
        attention_heads=1,
        image_size=32,
        patch_size=16,
        max_num_tiles=1,
        vision_output_dim=WIDTH,
        intermediate_layers_indices=[0],
        supported_aspect_ratios=[[1, 1]],
    )
    model: Any = _TRANSFORMERS.MllamaForConditionalGeneration(
        _TRANSFORMERS.MllamaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE_ID)
    )
    model.model.vision_model = VisionTower(WIDTH)
    for index in text.cross_attention_layers:  # Mllama opens these gates slowly, to protect a pretrained text model
        nn.init.constant_(model.model.language_model.layers[index].cross_attn_attn_gate, 1.0)
        nn.init.constant_(model.model.language_model.layers[index].cross_attn_mlp_gate, 1.0)
    return model


def _placeholder_vision_config() -> Any:
    """The smallest vision configuration that transformers accepts; `VisionTower` replaces its model."""
    return _TRANSFORMERS.CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        image_size=16,
        patch_size=16,
    )


assert (SPECIAL[PAD_ID], SPECIAL[END_ID], SPECIAL[IMAGE_ID]) == ("<|pad|>", "<|end|>", "<|image|>")  # noqa: S101
assert CELLS == 4  # noqa: S101
