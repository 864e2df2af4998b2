"""Self-MM (Yu et al., AAAI 2021): BERT over words, an LSTM each over sound and face; a head each and one for all.

`text` INT64 [B, L], token ids without special tokens, -1 where none is; `audio` FP32 [B, T, 74] and `video` FP32
[B, T, 35], features of COVAREP and Facet, zeros after a row's own; to `score` FP32 [B] (sentiment, -3…3), `label` [B]
(1 where it is above 0) and `confidence` [B]. Late fusion: one modality alone is answered by its own head; of several,
the fusing layer reads those that are there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from trimtab_model_servers.families.interfaces import Built
from trimtab_model_servers.families.modality_inputs import built_from, select_inputs
from trimtab_model_servers.families.parameters import Parameters, read_parameters
from trimtab_model_servers.families.pretrained import TRANSFORMERS
from trimtab_model_servers.families.sequences import framed, known, packed, padded
from trimtab_model_servers.weights import with_weights
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint

KNOBS = frozenset({"modalities"})
READS = {"text": 768, "audio": 74, "video": 35}
HIDDEN = {"audio": 16, "video": 32}
GIVES = {"text": 768, "audio": 16, "video": 32}
HEADS = {"text": 32, "audio": 16, "video": 32}
FUSED = 128
MODALITIES = tuple(READS)
BEGIN, END, PADDING, UNKNOWN = 101, 102, 0, 100
_MODEL, _CONFIG = TRANSFORMERS.BertModel, TRANSFORMERS.BertConfig


class SelfMmParameters(Parameters):
    """Settings of the family; its defaults are MMSA's for MOSEI."""

    max_tokens: int = Field(default=50, ge=3, le=512, description="Tokens read of a text; what is beyond is cut")
    layers: int = Field(default=12, ge=1, le=48, description="Of BERT")


class Head(nn.Module):
    """Two layers and a number."""

    def __init__(self, read: int, inner: int) -> None:
        super().__init__()
        self.first = nn.Linear(read, inner)
        self.second = nn.Linear(inner, inner)
        self.last = nn.Linear(inner, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, read] to [B]."""
        return self.after(self.first(x))

    def after(self, x: Tensor) -> Tensor:
        """What the first layer gave [B, inner] to [B]."""
        score: Tensor = self.last(torch.relu(self.second(torch.relu(x))))
        return score[:, 0]


class Sequence(nn.Module):
    """An LSTM's last state, and a layer over it."""

    def __init__(self, read: int, hidden: int, gives: int) -> None:
        super().__init__()
        self.memory = nn.LSTM(read, hidden, batch_first=True)
        self.last = nn.Linear(hidden, gives)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, read] to [B, gives]; each row ends where its numbers do."""
        seen, _ = self.memory(x)
        there = (x != 0).any(dim=2)
        steps = torch.arange(x.shape[1], device=x.device)
        ends = (there * steps).amax(dim=1)
        features: Tensor = self.last(seen[torch.arange(x.shape[0]), ends])
        return features


class SelfMm(nn.Module):
    """Three encoders, three heads, and one for what is fused."""

    def __init__(self, size: SelfMmParameters) -> None:
        super().__init__()
        self.most = size.max_tokens
        self.config = _CONFIG(num_hidden_layers=size.layers)
        self.bert: Any = _MODEL(self.config)
        self.sequences = nn.ModuleDict(
            {name: Sequence(READS[name], HIDDEN[name], GIVES[name]) for name in ("audio", "video")}
        )
        self.heads = nn.ModuleDict({name: Head(GIVES[name], HEADS[name]) for name in MODALITIES})
        self.fusion = Head(sum(GIVES.values()), FUSED)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Score the sentiment from some modalities, [B]."""
        return self.fuse({name: self.encode(name, tensor) for name, tensor in inputs.items()})

    def encode(self, name: str, tensor: Tensor) -> Tensor:
        """Compute the features of one modality, [B, 768], [B, 16] or [B, 32]."""
        if name != "text":
            features: Tensor = self.sequences[name](tensor)
            return features
        body = known(packed(tensor, self.most - 2), self.config.vocab_size, UNKNOWN)
        ids, mask = padded(framed([(BEGIN,), body, (END,)]), PADDING)
        first: Tensor = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]
        return first

    def fuse(self, features: Mapping[str, Tensor]) -> Tensor:
        """Score from features: by its own head where there is one modality, else by the columns of those there are."""
        if len(features) == 1:
            (name,) = features
            alone: Tensor = self.heads[name](features[name])
            return alone
        columns = torch.split(self.fusion.first.weight, list(GIVES.values()), dim=1)
        kept = [(columns[n], features[name]) for n, name in enumerate(MODALITIES) if name in features]
        joined = sum(nn.functional.linear(feature, column) for column, feature in kept)
        return self.fusion.after(joined + self.fusion.first.bias)


@dataclass(frozen=True, slots=True)
class SelfMmNetwork:
    """Self-MM as a replica serves it."""

    network: SelfMm

    def infer(self, inputs: dict[str, Tensor], point: OperatingPoint) -> dict[str, Tensor]:
        """Answer from the point's modalities: `score`, `label` and `confidence`, [B] each."""
        score = self.network(select_inputs(inputs, point, MODALITIES)).clamp(-3.0, 3.0)
        return {"score": score, "label": (score > 0).to(torch.int64), "confidence": score.abs().sigmoid()}


def build(spec: ModelSpec) -> Built:
    """Build it with stored or random weights."""
    parameters = read_parameters(SelfMmParameters, spec)
    network, random = with_weights(spec, lambda: SelfMm(parameters))
    return built_from(SelfMmNetwork(network), random)
