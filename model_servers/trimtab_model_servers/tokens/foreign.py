"""Vision transformers of torchvision and timm: their tensors under our names, and the shape these tensors tell.

timm's names are ours, torchvision's are translated. What a shape does not tell is the number of heads: 64 numbers a
head unless said otherwise.
"""

import re
from collections.abc import Mapping
from math import isqrt

import torch
from torch import Tensor

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.tokens.shape import Shape
from trimtab_model_servers.tokens.tasks import Head

HEAD_WIDTH = 64
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


def translated(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give tensors of torchvision our names; those of timm have them already."""
    if "conv_proj.weight" not in tensors:
        return dict(tensors)
    return {_renamed(name): tensor for name, tensor in tensors.items()}


def shape_of(tensors: Mapping[str, Tensor], where: str, heads: int | None = None) -> Shape:
    """Read the shape off translated tensors.

    Raises:
        ModelError: these are no vision transformer that we run; the message names the tensor that is missing.
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
    return Shape(
        side=cells * patch,
        patch=patch,
        channels=channels,
        width=width,
        depth=depth,
        heads=heads or max(1, width // HEAD_WIDTH),
        inner=inner,
        registers=registers,
        embedded=embedded,
        pooling="Mean" if "fc_norm.weight" in tensors else "Token",
        scaled="blocks.0.ls1.gamma" in tensors,
        keys_normalised="blocks.0.attn.q_norm.weight" in tensors,
        normalised_first="norm_pre.weight" in tensors,
    )


def parted(tensors: Mapping[str, Tensor], where: str) -> tuple[dict[str, Tensor], Head]:
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
