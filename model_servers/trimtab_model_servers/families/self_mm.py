"""Self-MM (Yu et al., AAAI 2021): BERT for text, an LSTM each for audio and video; unimodal heads and a fused head.

Inputs are `text` INT64 [B, L], token ids without special tokens, padded with -1, and `audio` FP32 [B, T, 74] and
`video` FP32 [B, T, 35], features of COVAREP and Facet, padded with zeros; outputs are `score` FP32 [B] (sentiment,
-3…3), `label` [B] (1 if the score is positive) and `confidence` [B]. Late fusion: a single modality uses its own head,
several use their columns of the fusion layer.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from trimtab_model_servers.families.interfaces import Parameters
from trimtab_model_servers.families.multimodal import MultimodalModel, build_multimodal
from trimtab_model_servers.families.sequences import model_inputs
from trimtab_model_servers.families.transformers_package import TRANSFORMERS

INPUTS = {"text": 768, "audio": 74, "video": 35}
HIDDEN = {"audio": 16, "video": 32}
OUTPUTS = {"text": 768, "audio": 16, "video": 32}
HEADS = {"text": 32, "audio": 16, "video": 32}
FUSED = 128
KNOBS = frozenset({"modalities"})
MODALITIES = tuple(INPUTS)
_MODEL, _CONFIG = TRANSFORMERS.BertModel, TRANSFORMERS.BertConfig


class SelfMmParameters(Parameters):
    """Settings of the family; the defaults are MMSA's for MOSEI."""

    max_tokens: int = Field(default=50, ge=3, le=512, description="Tokens read of a text; the rest is cut")
    layers: int = Field(default=12, ge=1, le=48, description="Layers of BERT")


class Head(nn.Module):
    """Three linear layers to a score."""

    def __init__(self, inputs: int, inner: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, inner)
        self.second = nn.Linear(inner, inner)
        self.last = nn.Linear(inner, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs] to [B]."""
        return self.after(self.first(x))

    def after(self, x: Tensor) -> Tensor:
        """Map the output of the first layer [B, inner] to [B]."""
        score: Tensor = self.last(torch.relu(self.second(torch.relu(x))))
        return score[:, 0]


class Sequence(nn.Module):
    """The last state of an LSTM, and a linear layer."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.memory = nn.LSTM(inputs, hidden, batch_first=True)
        self.last = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, inputs] to [B, outputs]; trailing zeros are padding."""
        states, _ = self.memory(x)
        nonzero = (x != 0).any(dim=2)
        rows, steps = (torch.arange(size, device=x.device) for size in x.shape[:2])
        ends = (nonzero * steps).amax(dim=1)
        features: Tensor = self.last(states[rows, ends])
        return features


class SelfMm(MultimodalModel):
    """Three encoders, three unimodal heads, and a fused head."""

    modalities = MODALITIES

    def __init__(self, size: SelfMmParameters) -> None:
        super().__init__()
        self.max_tokens = size.max_tokens
        self.config = _CONFIG(num_hidden_layers=size.layers)
        self.bert: Any = _MODEL(self.config)
        self.sequences = nn.ModuleDict(
            {name: Sequence(INPUTS[name], HIDDEN[name], OUTPUTS[name]) for name in ("audio", "video")}
        )
        self.heads = nn.ModuleDict({name: Head(OUTPUTS[name], HEADS[name]) for name in MODALITIES})
        self.fusion = Head(sum(OUTPUTS.values()), FUSED)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Score the sentiment from the given modalities, [B]."""
        return self.fuse({name: self.encode(name, tensor) for name, tensor in inputs.items()})

    def encode(self, name: str, tensor: Tensor) -> Tensor:
        """Compute the features of one modality, [B, 768], [B, 16] or [B, 32]."""
        if name != "text":
            features: Tensor = self.sequences[name](tensor)
            return features
        ids, mask = model_inputs(tensor, self.max_tokens, self.config.vocab_size)
        first: Tensor = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]
        return first

    def fuse(self, features: Mapping[str, Tensor]) -> Tensor:
        """Score features: a single modality by its own head, several by their columns of the fusion layer."""
        if len(features) == 1:
            (name,) = features
            score: Tensor = self.heads[name](features[name])
            return score
        columns = torch.split(self.fusion.first.weight, list(OUTPUTS.values()), dim=1)
        fused = [(columns[n], features[name]) for n, name in enumerate(MODALITIES) if name in features]
        joined = sum(nn.functional.linear(feature, column) for column, feature in fused)
        return self.fusion.after(joined + self.fusion.first.bias)

    def outputs(self, result: Tensor) -> dict[str, Tensor]:
        """Map scores to `score`, `label` and `confidence`, [B] each."""
        score = result.clamp(-3.0, 3.0)
        return {"score": score, "label": (score > 0).to(torch.int64), "confidence": score.abs().sigmoid()}


build = partial(build_multimodal, SelfMm, SelfMmParameters)
