"""Vision transformers of torchvision and timm: their tensors under our names, and the shape these tensors tell.

timm's names are ours, torchvision's are translated. Tensors do not tell all: heads are read off normalised queries,
else known of published sizes, else to be said; the activation is GELU unless said otherwise; epsilon is what goes with
a normalisation before the first layer, or without one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.transformer.config import SHAPES, Activation, ViTConfig
from trimtab_model_servers.transformer.image_preprocessing import Normalisation
from trimtab_model_servers.transformer.tasks import Head

_HEADS = {(one.width, one.depth): one.heads for one in SHAPES.values()} | {
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
"""By width and depth, of the transformers that torchvision and timm publish with a class token. A size that they
publish with several numbers of heads, such as 1536 by 40, is left out."""
_EPSILON, _EPSILON_NORMALISED_FIRST = 1e-6, 1e-5
"""The latter goes with OpenAI's kind, whose tokens are normalised before the first layer."""
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


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What a variant says of weights that do not tell it themselves; None where it says nothing.

    Attributes:
        heads: of attention.
        epsilon: added to variances by the normalisations.
        activation: of the perceptrons.
        normalisation: of images.
    """

    heads: int | None = None
    epsilon: float | None = None
    activation: Activation | None = None
    normalisation: Normalisation | None = None


UNSPECIFIED = CheckpointInfo()


def convert_state_dict(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give tensors of torchvision our names; those of timm have them already."""
    if "conv_proj.weight" not in tensors:
        return dict(tensors)
    return {_renamed(name): tensor for name, tensor in tensors.items()}


def infer_config(tensors: Mapping[str, Tensor], where: str, told: CheckpointInfo = UNSPECIFIED) -> ViTConfig:
    """Read the shape off translated tensors.

    Raises:
        ModelError: these are no vision transformer that we run, and the message names the tensor that is missing; or
            nothing tells the number of heads.
    """
    try:
        kernel, placed = tensors["patch_embed.proj.weight"], tensors["pos_embed"]
        registers = tensors["reg_token"].shape[1] if "reg_token" in tensors else 0
        depth = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
        leading = tensors["cls_token"].shape[1] + registers
        inner = tensors["blocks.0.mlp.fc1.weight"].shape[0]
    except (KeyError, ValueError) as error:
        raise ModelError(
            f"{where}: no vision transformer with a class token, as torchvision or timm names its tensors ({error})"
        ) from error
    width, channels, patch = kernel.shape[:3]
    count = placed.shape[1]
    embedded = isqrt(count) ** 2 != count
    cells = isqrt(count - leading if embedded else count)
    normalised_first = "norm_pre.weight" in tensors
    return ViTConfig(
        side=cells * patch,
        patch=patch,
        channels=channels,
        width=width,
        depth=depth,
        heads=told.heads or _heads(tensors, width, depth, where),
        inner=inner,
        epsilon=told.epsilon or (_EPSILON_NORMALISED_FIRST if normalised_first else _EPSILON),
        activation=told.activation or "GELU",
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
            f"{where}: its tensors do not tell how many heads attention has, and {depth} layers of width {width} are "
            "no published size; say so by parameters.heads"
        )
    return _HEADS[width, depth]


def split_head(tensors: Mapping[str, Tensor], where: str) -> tuple[dict[str, Tensor], Head]:
    """Divide translated tensors into those of the transformer and its head; biases that are left out are zero."""
    if "head.weight" not in tensors or "head.bias" not in tensors:
        raise ModelError(f"{where}: this transformer has no head (head.weight, head.bias); it classifies nothing")
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith("head.")}
    weights = ("patch_embed.proj", "attn.qkv")
    for name in [name for name in own if name.endswith(".weight") and name.removesuffix(".weight").endswith(weights)]:
        own.setdefault(f"{name.removesuffix('.weight')}.bias", torch.zeros(own[name].shape[0]))
    return own, Head(tensors["head.weight"].float(), tensors["head.bias"].float())


def _renamed(name: str) -> str:
    for pattern, ours in _TORCHVISION:
        name = re.sub(pattern, ours, name)
    return name
