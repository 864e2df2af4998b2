"""ViLT (Kim et al., ICML 2021): one trunk over words and the patches of an image, by way of transformers' own modules.

`text` INT64 [B, L], token ids without special tokens, -1 where none is; `image` FP32 [B, 3, 384, 384]; to `label` and
`confidence`. Early fusion: an absent image has no tokens; where the text is absent, its class token alone stays, which
the pooler reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from trimtab_model_servers.families.interfaces import Built
from trimtab_model_servers.families.modality_inputs import built_from, classify, select_inputs
from trimtab_model_servers.families.parameters import Parameters, read_parameters
from trimtab_model_servers.families.pretrained import TRANSFORMERS
from trimtab_model_servers.families.sequences import framed, known, packed, padded
from trimtab_model_servers.weights import with_weights
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint

KNOBS = frozenset({"modalities"})
MODALITIES = ("text", "image")
BEGIN, END, PADDING, UNKNOWN = 101, 102, 0, 100
_MODEL, _CONFIG = TRANSFORMERS.ViltModel, TRANSFORMERS.ViltConfig


class ViltParameters(Parameters):
    """Settings of the family; its defaults are those of the paper (ViLT-B/32)."""

    labels: int = Field(default=23, ge=2, le=10_000, description="Classes; MM-IMDb has 23 genres")
    max_tokens: int = Field(default=40, ge=3, le=512, description="Tokens read of a text; what is beyond is cut")
    layers: int = Field(default=12, ge=1, le=48)


class Vilt(nn.Module):
    """ViLT's own modules, run over whichever tokens there are."""

    def __init__(self, size: ViltParameters) -> None:
        super().__init__()
        self.config = _CONFIG(max_position_embeddings=size.max_tokens, num_hidden_layers=size.layers)
        self.model: Any = _MODEL(self.config)
        self.most = size.max_tokens
        self.head = nn.Linear(self.config.hidden_size, size.labels)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Score the labels from text, image or both: [B, labels]."""
        rows = next(iter(inputs.values())).shape[0]
        words, mask = self._words(inputs.get("text"), rows)
        tokens, masks = [words], [mask]
        if "image" in inputs:
            tokens.append(self._patches(inputs["image"]))
            masks.append(torch.ones(tokens[-1].shape[:2], dtype=mask.dtype))
        absent = torch.cat(masks, dim=1)[:, None, None] == 0
        bias = torch.zeros(absent.shape).masked_fill(absent, torch.finfo(torch.float32).min) if absent.any() else None
        last = self.model.encoder(torch.cat(tokens, dim=1), attention_mask=bias).last_hidden_state
        scores: Tensor = self.head(self.model.pooler(self.model.layernorm(last)))
        return scores

    def _words(self, text: Tensor | None, rows: int) -> tuple[Tensor, Tensor]:
        """Tokens [B, L, 768] and their mask; without a text only the class token, which is what the pooler reads."""
        if text is None:
            ids = torch.full((rows, 1), BEGIN)
            mask = torch.ones_like(ids)
        else:
            body = known(packed(text, self.most - 2), self.config.vocab_size, UNKNOWN)
            ids, mask = padded(framed([(BEGIN,), body, (END,)]), PADDING)
        embeddings = self.model.embeddings
        kinds = embeddings.token_type_embeddings.weight
        words: Tensor = embeddings.text_embeddings(input_ids=ids) + kinds[0]
        return words, mask

    def _patches(self, image: Tensor) -> Tensor:
        embeddings = self.model.embeddings
        cut = embeddings.patch_embeddings(image)
        cut = cut.flatten(2).transpose(1, 2) if cut.dim() == 4 else cut
        kind: Tensor = embeddings.token_type_embeddings.weight[1]
        first = embeddings.cls_token.expand(image.shape[0], -1, -1)
        placed: Tensor = torch.cat([first, cut], dim=1) + embeddings.position_embeddings
        return placed + kind


@dataclass(frozen=True, slots=True)
class ViltNetwork:
    """ViLT as a replica serves it."""

    network: Vilt

    def infer(self, inputs: dict[str, Tensor], point: OperatingPoint) -> dict[str, Tensor]:
        """Answer from the point's modalities: `label` [B] and `confidence` [B]."""
        return classify(self.network(select_inputs(inputs, point, MODALITIES)))


def build(spec: ModelSpec) -> Built:
    """Build it with stored or random weights."""
    parameters = read_parameters(ViltParameters, spec)
    network, random = with_weights(spec, lambda: Vilt(parameters))
    return built_from(ViltNetwork(network), random)
