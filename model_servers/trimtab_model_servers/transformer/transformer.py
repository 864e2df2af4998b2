"""A vision transformer whose forward pass is ours, so that tokens may be merged and prompts added in any layer.

Parameters have the names that timm gives them. In each layer: prompts, attention, merging, perceptron (OTAS, section
III-B; ToMe, section 3). Attention is told how many patches a token stands for, but only once some have merged: a bias
keeps the fastest kernels away.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from trimtab_model_servers.transformer.config import Activation, ViTConfig
from trimtab_model_servers.transformer.merge_rules import RULES, MergeInputs, Rule
from trimtab_model_servers.transformer.merge_schedule import clamp_r, in_each_layer
from trimtab_pipelines.operating_point import OperatingPoint


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """How one batch goes through the layers.

    Attributes:
        merged: patches merged away in each layer; fewer where that is more than half of them. Empty: none.
        rule: how.
        proportional: whether attention counts a token as often as it stands for a patch.
        prompts: [B, layers, P, d], learned tokens that stand after the class token.
        accumulate: whether each layer's prompts join those before instead of taking their place.
    """

    merged: Sequence[int] = ()
    rule: Rule = field(default_factory=lambda: RULES["bipartite"])
    proportional: bool = True
    prompts: Tensor | None = None
    accumulate: bool = False


PLAIN = ForwardPlan()
_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "GELU": nn.functional.gelu,
    "GELUTanh": partial(nn.functional.gelu, approximate="tanh"),
    "QuickGELU": lambda x: x * torch.sigmoid(1.702 * x),
}


@dataclass(slots=True)
class _Tokens:
    """A batch on its way: leading tokens, then patches.

    Attributes:
        all: [B, N, d].
        leading: how many of them are not patches.
        sizes: [B, patches], what each patch token stands for; None as long as each stands for itself.
    """

    all: Tensor
    leading: int
    sizes: Tensor | None = None

    def bias(self) -> Tensor | None:
        """The logarithm of each token's size [B, 1, 1, N], which attention adds to its scores."""
        if self.sizes is None:
            return None
        return nn.functional.pad(self.sizes.log(), (self.leading, 0))[:, None, None]

    def merge(self, rule: Rule, evidence: MergeInputs, merged: int) -> None:
        """Merge so many patches away."""
        patches = self.all[:, self.leading :]
        sizes = self.sizes if self.sizes is not None else patches.new_ones(patches.shape[:2])
        fewer, self.sizes = rule.merge(patches, sizes, evidence, merged)
        self.all = torch.cat([self.all[:, : self.leading], fewer], dim=1)


class Attention(nn.Module):
    """Attention of many heads over all tokens."""

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
        told = None if bias is None else bias.to(queries.dtype)
        mixed = scaled_dot_product_attention(queries, keys, values, attn_mask=told)
        return self.proj(mixed.transpose(1, 2).reshape(batch, count, width)), queries, keys


class Perceptron(nn.Module):
    """Two linear layers with an activation between."""

    def __init__(self, shape: ViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(shape.width, shape.inner)
        self.fc2 = nn.Linear(shape.inner, shape.width)
        self.activation = _ACTIVATIONS[shape.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, N, d] to the same shape."""
        mapped: Tensor = self.fc2(self.activation(self.fc1(x)))
        return mapped


class Scale(nn.Module):
    """One factor for each number of a token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return x * self.gamma


class Layer(nn.Module):
    """Attention and a perceptron, each normalised before and added to what comes in."""

    def __init__(self, shape: ViTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width, eps=shape.epsilon)
        self.attn = Attention(shape)
        self.ls1 = Scale(shape.width) if shape.scaled else nn.Identity()
        self.norm2 = nn.LayerNorm(shape.width, eps=shape.epsilon)
        self.mlp = Perceptron(shape)
        self.ls2 = Scale(shape.width) if shape.scaled else nn.Identity()

    def forward(self, tokens: _Tokens, merged: int, course: ForwardPlan, progress: float) -> None:
        """Run one layer; `tokens` changes in place."""
        bias = tokens.bias() if course.proportional else None
        mixed, queries, keys = self.attn(self.norm1(tokens.all), bias)
        tokens.all = tokens.all + self.ls1(mixed)
        if merged:
            tokens.merge(course.rule, _evidence(queries, keys, bias, tokens.leading, course.rule, progress), merged)
        tokens.all = tokens.all + self.ls2(self.mlp(self.norm2(tokens.all)))


def forward_plan(point: OperatingPoint, depth: int, *, proportional: bool = True) -> ForwardPlan:
    """The course of a point, prompts aside.

    Raises:
        KeyError: there is no such rule.
        ValueError: the schedule is of another number of layers.
    """
    merging = point.merging
    rule = RULES[merging.rule if merging and merging.rule else next(iter(RULES))]
    merged = in_each_layer(merging.schedule if merging else (), depth)
    accumulate = point.prompts is not None and point.prompts.mode == "Accumulate"
    return ForwardPlan(merged, rule, proportional=proportional, accumulate=accumulate)


class VisionTransformer(nn.Module):
    """Images in, what the heads read out."""

    def __init__(self, shape: ViTConfig) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = nn.ModuleDict(
            {"proj": nn.Conv2d(shape.channels, shape.width, shape.patch, stride=shape.patch)}
        )
        self.cls_token = nn.Parameter(torch.zeros(1, 1, shape.width))
        if shape.registers:
            self.reg_token = nn.Parameter(torch.zeros(1, shape.registers, shape.width))
        placed = shape.patches + (shape.leading if shape.embedded else 0)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, placed, shape.width))
        self.norm_pre = nn.LayerNorm(shape.width, eps=shape.epsilon) if shape.normalised_first else nn.Identity()
        self.blocks = nn.ModuleList([Layer(shape) for _ in range(shape.depth)])
        if shape.pooling == "Token":
            self.norm = nn.LayerNorm(shape.width, eps=shape.epsilon)
        else:
            self.fc_norm = nn.LayerNorm(shape.width, eps=shape.epsilon)

    def forward(self, images: Tensor, plan: ForwardPlan = PLAIN) -> Tensor:
        """Map images [B, channels, side, side] to features [B, d], on the given course."""
        shape = self.shape
        tokens = _Tokens(self._embedded(images), shape.leading)
        for layer, block in enumerate(self.blocks):
            self._prompt(tokens, plan, layer)
            asked = plan.merged[layer] if plan.merged else 0
            block(tokens, clamp_r(asked, tokens.all.shape[1] - tokens.leading), plan, layer / shape.depth)
        return self._pooled(tokens)

    def _embedded(self, images: Tensor) -> Tensor:
        patches = self.patch_embed["proj"](images).flatten(2).transpose(1, 2)
        leading = [self.cls_token, *([self.reg_token] if self.shape.registers else [])]
        # Where it is compiled, a shape stays a symbol, but a length is the number that the example had.
        expanded = [token.expand(images.shape[0], -1, -1) for token in leading]
        if self.shape.embedded:
            placed = torch.cat([*expanded, patches], dim=1) + self.pos_embed
        else:
            placed = torch.cat([*expanded, patches + self.pos_embed], dim=1)
        embedded: Tensor = self.norm_pre(placed)
        return embedded

    def _prompt(self, tokens: _Tokens, course: ForwardPlan, layer: int) -> None:
        """Put this layer's prompts after the class token, in the place of those before where that copies nothing."""
        if course.prompts is None:
            return
        prompts = course.prompts[:, layer]
        replaced = tokens.leading - self.shape.leading if not course.accumulate else 0
        if replaced == prompts.shape[1] and not torch.is_grad_enabled():
            tokens.all[:, 1 : 1 + replaced] = prompts
            return
        rest = tokens.all[:, 1 + replaced :]
        tokens.all = torch.cat([tokens.all[:, :1], prompts.to(rest.dtype), rest], dim=1)
        tokens.leading += prompts.shape[1] - replaced

    def _pooled(self, tokens: _Tokens) -> Tensor:
        """What the heads read: the class token, or the mean over the patches that there were."""
        if self.shape.pooling == "Token":
            read: Tensor = self.norm(tokens.all[:, 0])
            return read
        patches = tokens.all[:, tokens.leading :]
        if tokens.sizes is not None:
            patches = patches * tokens.sizes[..., None]
        mean: Tensor = self.fc_norm(patches.sum(dim=1) / self.shape.patches)
        return mean


def _evidence(
    queries: Tensor, keys: Tensor, bias: Tensor | None, leading: int, rule: Rule, progress: float
) -> MergeInputs:
    """What a rule may ask of this layer's attention, for the patches alone."""
    importance = None
    if rule.needs_importance:
        with torch.no_grad():
            scores = queries[:, :, :1] @ keys.transpose(2, 3) * queries.shape[-1] ** -0.5
            paid = (scores if bias is None else scores + bias).softmax(dim=-1)
            importance = paid[:, :, 0, leading:].mean(dim=1)
    seen = keys[:, :, leading:].mean(dim=1)
    return MergeInputs(seen.float() if seen.dtype in {torch.bfloat16, torch.float16} else seen, importance, progress)
