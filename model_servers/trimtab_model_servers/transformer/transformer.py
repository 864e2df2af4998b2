"""Vision transformer whose forward pass merges tokens and adds prompts in any layer.

Parameters have timm's names. Each layer applies prompts, attention, merging and the perceptron (OTAS, section III-B;
ToMe, section 3). Attention is biased by token sizes only after the first merge, because a bias disables the fastest
kernels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from trimtab_model_servers.transformer.config import Activation, ViTConfig
from trimtab_model_servers.transformer.merging import RULES, MergeInputs, Rule, clamp_r, in_each_layer
from trimtab_pipelines.operating_point import OperatingPoint

_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "GELU": nn.functional.gelu,
    "GELUTanh": partial(nn.functional.gelu, approximate="tanh"),
    "QuickGELU": lambda x: x * torch.sigmoid(1.702 * x),
}


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """Merging and prompts of one forward pass."""

    merged: Sequence[int] = ()
    """Patches merged in each layer, at most half of them; empty: none."""
    rule: Rule = field(default_factory=lambda: RULES["bipartite"])
    proportional: bool = True
    """Whether attention weighs a token by the number of its patches."""
    prompts: Tensor | None = None
    """[B, layers, P, d], learned tokens after the class token."""
    accumulate: bool = False
    """Whether each layer adds its prompts to those before instead of replacing them."""


PLAIN = ForwardPlan()


@dataclass(slots=True)
class _Tokens:
    """Tokens of a batch: leading tokens, then patches."""

    all: Tensor
    """[B, N, d]."""
    leading: int
    """Number of tokens before the patches."""
    sizes: Tensor | None = None
    """[B, patches], number of patches merged into each; None before the first merge."""

    def bias(self) -> Tensor | None:
        """Attention bias [B, 1, 1, N]: the logarithm of each token's size."""
        if self.sizes is None:
            return None
        return nn.functional.pad(self.sizes.log(), (self.leading, 0))[:, None, None]

    def merge(self, rule: Rule, merge_inputs: MergeInputs, merged: int) -> None:
        patches = self.all[:, self.leading :]
        sizes = self.sizes if self.sizes is not None else patches.new_ones(patches.shape[:2])
        fewer, self.sizes = rule.merge(patches, sizes, merge_inputs, merged)
        self.all = torch.cat([self.all[:, : self.leading], fewer], dim=1)


class Attention(nn.Module):
    """Multi-head attention over all tokens."""

    def __init__(self, shape: ViTConfig) -> None:
        super().__init__()
        head = shape.width // shape.heads
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.q_norm = nn.LayerNorm(head, eps=shape.epsilon) if shape.keys_normalised else nn.Identity()
        self.k_norm = nn.LayerNorm(head, eps=shape.epsilon) if shape.keys_normalised else nn.Identity()
        self.proj = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Map [B, N, d] to the same shape; also return queries and keys [B, heads, N, d / heads]."""
        batch, count, width = x.shape
        split = self.qkv(x).view(batch, count, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4).unbind(0)
        queries, keys = self.q_norm(queries), self.k_norm(keys)
        mask = None if bias is None else bias.to(queries.dtype)
        mixed = scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return self.proj(mixed.transpose(1, 2).reshape(batch, count, width)), queries, keys


class Perceptron(nn.Module):
    """MLP of two linear layers."""

    def __init__(self, shape: ViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(shape.width, shape.inner)
        self.fc2 = nn.Linear(shape.inner, shape.width)
        self.activation = _ACTIVATIONS[shape.activation]

    def forward(self, x: Tensor) -> Tensor:
        mapped: Tensor = self.fc2(self.activation(self.fc1(x)))
        return mapped


class Scale(nn.Module):
    """LayerScale: one factor for each dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Layer(nn.Module):
    """Pre-norm residual layer of attention and perceptron."""

    def __init__(self, shape: ViTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width, eps=shape.epsilon)
        self.attn = Attention(shape)
        self.ls1 = Scale(shape.width) if shape.scaled else nn.Identity()
        self.norm2 = nn.LayerNorm(shape.width, eps=shape.epsilon)
        self.mlp = Perceptron(shape)
        self.ls2 = Scale(shape.width) if shape.scaled else nn.Identity()

    def forward(self, tokens: _Tokens, merged: int, plan: ForwardPlan, progress: float) -> None:
        """Run one layer on `tokens`, in place."""
        bias = tokens.bias() if plan.proportional else None
        mixed, queries, keys = self.attn(self.norm1(tokens.all), bias)
        tokens.all = tokens.all + self.ls1(mixed)
        if merged:
            tokens.merge(plan.rule, _merge_inputs(queries, keys, bias, tokens.leading, plan.rule, progress), merged)
        tokens.all = tokens.all + self.ls2(self.mlp(self.norm2(tokens.all)))


def forward_plan(point: OperatingPoint, depth: int, *, proportional: bool = True) -> ForwardPlan:
    """A point's plan without prompts; KeyError for an unknown rule, ValueError for another number of layers."""
    merging = point.merging
    rule = RULES[merging.rule if merging and merging.rule else next(iter(RULES))]
    merged = in_each_layer(merging.schedule if merging else (), depth)
    accumulate = point.prompts is not None and point.prompts.mode == "Accumulate"
    return ForwardPlan(merged, rule, proportional=proportional, accumulate=accumulate)


class VisionTransformer(nn.Module):
    """Encoder of images to the features that heads read."""

    def __init__(self, shape: ViTConfig) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = nn.ModuleDict(
            {"proj": nn.Conv2d(shape.channels, shape.width, shape.patch, stride=shape.patch)}
        )
        self.cls_token = nn.Parameter(torch.zeros(1, 1, shape.width))
        if shape.registers:
            self.reg_token = nn.Parameter(torch.zeros(1, shape.registers, shape.width))
        positions = shape.patches + (shape.leading if shape.embedded else 0)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, positions, shape.width))
        self.norm_pre = nn.LayerNorm(shape.width, eps=shape.epsilon) if shape.normalised_first else nn.Identity()
        self.blocks = nn.ModuleList([Layer(shape) for _ in range(shape.depth)])
        if shape.pooling == "Token":
            self.norm = nn.LayerNorm(shape.width, eps=shape.epsilon)
        else:
            self.fc_norm = nn.LayerNorm(shape.width, eps=shape.epsilon)

    def forward(self, images: Tensor, plan: ForwardPlan = PLAIN) -> Tensor:
        """Map images [B, channels, side, side] to features [B, d]."""
        shape = self.shape
        tokens = _Tokens(self._embed(images), shape.leading)
        for layer, block in enumerate(self.blocks):
            self._add_prompts(tokens, plan, layer)
            merged = plan.merged[layer] if plan.merged else 0
            block(tokens, clamp_r(merged, tokens.all.shape[1] - tokens.leading), plan, layer / shape.depth)
        return self._pool(tokens)

    def _embed(self, images: Tensor) -> Tensor:
        patches = self.patch_embed["proj"](images).flatten(2).transpose(1, 2)
        leading = [self.cls_token, *([self.reg_token] if self.shape.registers else [])]
        # In compiled code a shape stays symbolic, but len() is a constant.
        expanded = [token.expand(images.shape[0], -1, -1) for token in leading]
        if self.shape.embedded:
            placed = torch.cat([*expanded, patches], dim=1) + self.pos_embed
        else:
            placed = torch.cat([*expanded, patches + self.pos_embed], dim=1)
        embedded: Tensor = self.norm_pre(placed)
        return embedded

    def _add_prompts(self, tokens: _Tokens, plan: ForwardPlan, layer: int) -> None:
        """Insert this layer's prompts after the class token, replacing the previous ones in place if possible."""
        if plan.prompts is None:
            return
        prompts = plan.prompts[:, layer]
        replaced = tokens.leading - self.shape.leading if not plan.accumulate else 0
        if replaced == prompts.shape[1] and not torch.is_grad_enabled():
            tokens.all[:, 1 : 1 + replaced] = prompts
            return
        rest = tokens.all[:, 1 + replaced :]
        tokens.all = torch.cat([tokens.all[:, :1], prompts.to(rest.dtype), rest], dim=1)
        tokens.leading += prompts.shape[1] - replaced

    def _pool(self, tokens: _Tokens) -> Tensor:
        """Features of the heads: the class token, or the mean over the original patches."""
        if self.shape.pooling == "Token":
            features: Tensor = self.norm(tokens.all[:, 0])
            return features
        patches = tokens.all[:, tokens.leading :]
        if tokens.sizes is not None:
            patches = patches * tokens.sizes[..., None]
        mean: Tensor = self.fc_norm(patches.sum(dim=1) / self.shape.patches)
        return mean


def _merge_inputs(
    queries: Tensor, keys: Tensor, bias: Tensor | None, leading: int, rule: Rule, progress: float
) -> MergeInputs:
    """Keys and importance of the patches for a merge rule."""
    importance = None
    if rule.needs_importance:
        with torch.no_grad():
            scores = queries[:, :, :1] @ keys.transpose(2, 3) * queries.shape[-1] ** -0.5
            attention = (scores if bias is None else scores + bias).softmax(dim=-1)
            importance = attention[:, :, 0, leading:].mean(dim=1)
    patch_keys = keys[:, :, leading:].mean(dim=1)
    if patch_keys.dtype in {torch.bfloat16, torch.float16}:
        patch_keys = patch_keys.float()
    return MergeInputs(patch_keys, importance, progress)
