"""Import of torchvision and timm checkpoints: tensor names and the shape inferred from tensors.

torchvision's names are converted to timm's. The number of heads is inferred from normalised queries, else known for
published sizes, else a required parameter. Activation and epsilon have defaults.
"""

import re
from collections.abc import Mapping
from math import isqrt

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.transformer.config import SHAPES, Activation, Normalisation, ViTConfig
from trimtab_model_servers.transformer.tasks import Head

_HEADS = {(shape.width, shape.depth): shape.heads for shape in SHAPES.values()} | {
    (256, 10): 4,
    (384, 36): 6,
    (512, 12): 8,
    (640, 12): 10,
    (896, 12): 14,
    (1152, 27): 16,
    (1280, 32): 16,
    (1408, 40): 16,
    (1664, 48): 16,
}
"""Heads by width and depth of published transformers with a class token; ambiguous sizes such as 1536 by 40 are
missing."""
_EPSILON, _EPSILON_NORMALISED_FIRST = 1e-6, 1e-5
"""The latter is for transformers with a normalisation before the first layer, as OpenAI's."""
_TORCHVISION = (
    (r"^class_token$", "cls_token"),
    (r"^conv_proj\.", "patch_embed.proj."),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"^encoder\.ln\.", "norm."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"\.ln_([12])\.", r".norm\1."),
    (r"\.self_attention\.in_proj_", ".attn.qkv."),
    (r"\.self_attention\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.(?:linear_1|0)\.", ".mlp.fc1."),
    (r"\.mlp\.(?:linear_2|3)\.", ".mlp.fc2."),
    (r"^heads\.head\.", "head."),
)


class CheckpointInfo(BaseModel):
    """Settings that tensors do not contain; None is unspecified."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    heads: int | None = Field(
        default=None, ge=1, description="Attention heads, if neither the weights nor a known size determine them"
    )
    epsilon: float | None = Field(
        default=None, gt=0, description="Epsilon of layer norms; default 1e-5 with a norm before the layers, else 1e-6"
    )
    activation: Activation | None = Field(default=None, description="Of the feed-forward blocks; default GELU")
    normalisation: Normalisation | None = Field(default=None, description="Of images, if the weights do not state it")


UNSPECIFIED = CheckpointInfo()


def convert_state_dict(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors of torchvision; those of timm do not change."""
    if "conv_proj.weight" not in tensors:
        return dict(tensors)
    return {_rename(name): tensor for name, tensor in tensors.items()}


def infer_config(tensors: Mapping[str, Tensor], where: str, info: CheckpointInfo = UNSPECIFIED) -> ViTConfig:
    """Infer it from converted tensors; ModelError for another architecture or an unknown number of heads."""
    try:
        kernel, positions = tensors["patch_embed.proj.weight"], tensors["pos_embed"]
        registers = tensors["reg_token"].shape[1] if "reg_token" in tensors else 0
        depth = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
        leading = tensors["cls_token"].shape[1] + registers
        inner = tensors["blocks.0.mlp.fc1.weight"].shape[0]
    except (KeyError, ValueError) as error:
        raise ModelError(
            f"{where}: not a vision transformer of torchvision or timm with a class token ({error})"
        ) from error
    width, channels, patch = kernel.shape[:3]
    count = positions.shape[1]
    embedded = isqrt(count) ** 2 != count
    cells = isqrt(count - leading if embedded else count)
    normalised_first = "norm_pre.weight" in tensors
    return ViTConfig(
        side=cells * patch,
        patch=patch,
        channels=channels,
        width=width,
        depth=depth,
        heads=info.heads or _heads(tensors, width, depth, where),
        inner=inner,
        epsilon=info.epsilon or (_EPSILON_NORMALISED_FIRST if normalised_first else _EPSILON),
        activation=info.activation or "GELU",
        registers=registers,
        embedded=embedded,
        pooling="Mean" if "fc_norm.weight" in tensors else "Token",
        scaled="blocks.0.ls1.gamma" in tensors,
        keys_normalised="blocks.0.attn.q_norm.weight" in tensors,
        normalised_first=normalised_first,
    )


def _heads(tensors: Mapping[str, Tensor], width: int, depth: int, where: str) -> int:
    if "blocks.0.attn.q_norm.weight" in tensors:
        return max(1, width // len(tensors["blocks.0.attn.q_norm.weight"]))
    if (width, depth) not in _HEADS:
        raise ModelError(
            f"{where}: the number of attention heads is unknown, because {depth} layers of width {width} are "
            "no published size; set parameters.heads"
        )
    return _HEADS[width, depth]


def split_head(tensors: Mapping[str, Tensor], where: str) -> tuple[dict[str, Tensor], Head]:
    """Split converted tensors into those of the transformer and its head; missing biases are zero."""
    if "head.weight" not in tensors or "head.bias" not in tensors:
        raise ModelError(f"{where}: the transformer has no head (head.weight, head.bias)")
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith("head.")}
    for name in [name for name in weights if name.endswith(("patch_embed.proj.weight", "attn.qkv.weight"))]:
        weights.setdefault(f"{name.removesuffix('.weight')}.bias", torch.zeros(weights[name].shape[0]))
    return weights, Head(tensors["head.weight"].float(), tensors["head.bias"].float())


def _rename(name: str) -> str:
    for pattern, ours in _TORCHVISION:
        name = re.sub(pattern, ours, name)
    return name
