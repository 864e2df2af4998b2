"""Weights of torchvision and timm answer as in their own modules; what tensors do not tell is known or said."""

from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.layers import GELUTanh, QuickGELU
from torch.nn.functional import linear
from torchvision.models import VisionTransformer as Torchvision
from torchvision.models import vit_b_32, vit_h_14, vit_l_16

from tests.model_servers.transformer.test_transformer import images
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.transformer.checkpoint_import import (
    UNSPECIFIED,
    CheckpointInfo,
    convert_state_dict,
    infer_config,
    split_head,
)
from trimtab_model_servers.transformer.transformer import VisionTransformer


def from_foreign(module, info=UNSPECIFIED):
    named = convert_state_dict(module.state_dict())
    own, head = split_head(named, "it")
    ours = VisionTransformer(infer_config(named, "it", info)).eval()
    ours.load_state_dict(own)
    return ours, head


def shaken(module):
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return module.eval()


def differs(module, info=UNSPECIFIED, side=32):
    ours, head = from_foreign(module, info)
    with torch.inference_mode():
        got = linear(ours(images(side=side)), head.weight, head.bias)
        return float((got - module(images(side=side))).abs().max())


def test_without_merging_it_is_torchvisions():
    assert differs(shaken(Torchvision(32, 4, 4, 2, 32, 64, num_classes=10)), CheckpointInfo(heads=2)) <= 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reg_tokens": 4},
        {"reg_tokens": 4, "no_embed_class": True},
        {"init_values": 0.5, "qk_norm": True},
        {"global_pool": "avg"},
        {"qkv_bias": False, "pre_norm": True},
    ],
    ids=str,
)
def test_without_merging_it_is_timms(options):
    assert differs(shaken(small_timm(options)), CheckpointInfo(heads=2, epsilon=1e-6)) <= 1e-5


def small_timm(options):
    shape = {"img_size": 32, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2, "mlp_ratio": 2}
    given: dict[str, Any] = shape | options
    return timm.models.VisionTransformer(num_classes=10, **given)


NORMALISED_FIRST = {"pre_norm": True, "norm_layer": partial(torch.nn.LayerNorm, eps=1e-5)}


def sensitive(module):
    """Its tokens so small that what normalisations add counts, its perceptrons so strong that the activation does."""
    with torch.no_grad():
        for parameter in (module.pos_embed, module.cls_token, *module.patch_embed.parameters()):
            parameter.mul_(0.02)
        for block in module.blocks:
            block.mlp.fc1.weight.mul_(6)
    return module


@pytest.mark.parametrize(("name", "layer"), [("QuickGELU", QuickGELU), ("GELUTanh", GELUTanh)])
def test_activation_is_a_parameter_and_epsilon_is_inferred(name, layer):
    stock = sensitive(shaken(small_timm(NORMALISED_FIRST | {"act_layer": layer})))

    assert differs(stock, CheckpointInfo(heads=2, activation=name)) <= 1e-5
    assert differs(stock, CheckpointInfo(heads=2)) > 1e-5
    assert differs(stock, CheckpointInfo(heads=2, activation=name, epsilon=1e-6)) > 1e-5


def test_normalised_queries_tell_the_number_of_heads():
    assert differs(shaken(small_timm({"qk_norm": True}))) <= 1e-5


def test_unpublished_size_needs_the_number_of_heads():
    with pytest.raises(ModelError, match=r"set parameters.heads"):
        from_foreign(small_timm({}))


@pytest.mark.parametrize(
    ("make", "heads"), [(vit_b_32, 12), (vit_l_16, 16), (vit_h_14, 16)], ids=["base", "large", "huge"]
)
def test_torchvisions_sizes_are_known(make, heads):
    with torch.device("meta"):
        stock = make()

    assert infer_config(convert_state_dict(stock.state_dict()), "it").heads == heads


@pytest.mark.parametrize(
    "name",
    [
        "xsmall_patch16_clip_224",
        "tiny_patch16_224",
        "small_patch32_224",
        "small_patch16_36x1_224",
        "medium_patch32_clip_224",
        "betwixt_patch32_clip_224",
        "base_patch32_clip_224",
        "base_patch32_plus_256",
        "large_patch16_224",
        "so400m_patch14_siglip_224",
        "huge_patch14_clip_224",
        "giant_patch14_224",
        "giant_patch14_clip_224",
        "gigantic_patch14_clip_224",
    ],
)
def test_timms_sizes_and_what_goes_with_them_are_known(name):
    with torch.device("meta"):
        stock: Any = timm.create_model(f"vit_{name}", class_token=True, global_pool="token")
    shape = infer_config(stock.state_dict(), name)

    assert (shape.heads, shape.epsilon) == (stock.blocks[0].attn.num_heads, stock.blocks[0].norm1.eps)


def test_other_architectures_are_rejected():
    with pytest.raises(ModelError, match="not a vision transformer"):
        infer_config({"conv1.weight": torch.zeros(1)}, "weights")
