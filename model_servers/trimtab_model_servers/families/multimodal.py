"""Shared parts of multimodal families: `MultimodalModel` and a transformer encoder.

A modality that the operating point or the request leaves out is not computed; it is not replaced by zeros.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from trimtab_model_servers.families.interfaces import Built, Settings, read_parameters
from trimtab_model_servers.weights.loading import build_with_weights
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint


class MultimodalModel(nn.Module):
    """A network that maps the inputs of some modalities to scores of labels, as served."""

    modalities: tuple[str, ...]

    def infer(self, inputs: dict[str, Tensor], point: OperatingPoint) -> dict[str, Tensor]:
        """Compute the outputs from the modalities that point and batch have; raises ValueError if none is left."""
        allowed = point.modalities or self.modalities
        selected = {name: inputs[name] for name in self.modalities if name in allowed and name in inputs}
        if not selected:
            raise ValueError(f"the request has none of the inputs {', '.join(allowed)}; send at least one")
        return self.outputs(self(selected))

    def move_to(self, device: torch.device) -> None:
        self.to(device)

    def outputs(self, result: Any) -> dict[str, Tensor]:
        """Map the network's result, by default scores [B, classes], to `label` [B] and `confidence` [B]."""
        return classify(result)


def build_multimodal(
    construct: Callable[[Settings], MultimodalModel], settings: type[Settings], spec: ModelSpec
) -> Built:
    parameters = read_parameters(settings, spec)
    network, random = build_with_weights(spec, lambda: construct(parameters))
    return Built.of(network, random=random)


def classify(logits: Tensor) -> dict[str, Tensor]:
    """Map scores [B, classes] to `label` int64 [B] and `confidence` float32 [B], the probability of the label."""
    confidence, label = logits.softmax(dim=1).max(dim=1)
    return {"label": label, "confidence": confidence}


class Layer(nn.Module):
    """Self-attention and a feed-forward block, each with a residual connection."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.wide = nn.Linear(width, inner)
        self.narrow = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, tokens, width] to the same shape."""
        rows, tokens, width = x.shape
        split = self.project(self.before(x)).view(rows, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        output = scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(rows, tokens, width)
        x = x + self.attended(output)
        feed_forward: Tensor = self.narrow(gelu(self.wide(self.between(x))))
        return x + feed_forward


class Encoder(nn.Module):
    """A stack of layers and a final normalization."""

    def __init__(self, depth: int, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(width, heads, inner) for _ in range(depth)))
        self.last = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, tokens, width] to the same shape."""
        output: Tensor = self.last(self.layers(x))
        return output
