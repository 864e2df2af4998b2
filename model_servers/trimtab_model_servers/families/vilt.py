"""ViLT (Kim et al., ICML 2021): one transformer over text tokens and image patches, on transformers' own modules.

Inputs are `text` INT64 [B, L], token ids without special tokens, padded with -1, and `image` FP32 [B, 3, 384, 384];
outputs are `label` and `confidence`. Early fusion: an absent image has no tokens; of an absent text only the class
token remains, which the pooler reads.
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

KNOBS = frozenset({"modalities"})
MODALITIES = ("text", "image")
CLASS_TOKEN = 101
_MODEL, _CONFIG = TRANSFORMERS.ViltModel, TRANSFORMERS.ViltConfig


class ViltParameters(Parameters):
    """Settings of the family; the defaults are those of the paper (ViLT-B/32)."""

    labels: int = Field(default=23, ge=2, le=10_000, description="Number of classes; MM-IMDb has 23 genres")
    max_tokens: int = Field(default=40, ge=3, le=512, description="Tokens read of a text; the rest is cut")
    layers: int = Field(default=12, ge=1, le=48)


class Vilt(MultimodalModel):
    """ViLT's modules, run over the tokens of the given modalities."""

    modalities = MODALITIES

    def __init__(self, size: ViltParameters) -> None:
        super().__init__()
        self.config = _CONFIG(max_position_embeddings=size.max_tokens, num_hidden_layers=size.layers)
        self.model: Any = _MODEL(self.config)
        self.max_tokens = size.max_tokens
        self.head = nn.Linear(self.config.hidden_size, size.labels)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Score the labels from text, image or both: [B, labels]."""
        rows = next(iter(inputs.values())).shape[0]
        text, mask = self._embed_text(inputs.get("text"), rows)
        tokens, masks = [text], [mask]
        if "image" in inputs:
            tokens.append(self._embed_image(inputs["image"]))
            masks.append(mask.new_ones(tokens[-1].shape[:2]))
        absent = torch.cat(masks, dim=1)[:, None, None] == 0
        bias = (
            text.new_zeros(absent.shape).masked_fill(absent, torch.finfo(torch.float32).min) if absent.any() else None
        )
        last = self.model.encoder(torch.cat(tokens, dim=1), attention_mask=bias).last_hidden_state
        scores: Tensor = self.head(self.model.pooler(self.model.layernorm(last)))
        return scores

    def _embed_text(self, text: Tensor | None, rows: int) -> tuple[Tensor, Tensor]:
        """Tokens [B, L, 768] and their mask; without text only the class token."""
        if text is None:
            ids = torch.full((rows, 1), CLASS_TOKEN, device=self.head.weight.device)
            mask = torch.ones_like(ids)
        else:
            ids, mask = model_inputs(text, self.max_tokens, self.config.vocab_size)
        embeddings = self.model.embeddings
        kinds = embeddings.token_type_embeddings.weight
        tokens: Tensor = embeddings.text_embeddings(input_ids=ids) + kinds[0]
        return tokens, mask

    def _embed_image(self, image: Tensor) -> Tensor:
        embeddings = self.model.embeddings
        patches = embeddings.patch_embeddings(image)
        patches = patches.flatten(2).transpose(1, 2) if patches.dim() == 4 else patches
        kind: Tensor = embeddings.token_type_embeddings.weight[1]
        first = embeddings.cls_token.expand(image.shape[0], -1, -1)
        positioned: Tensor = torch.cat([first, patches], dim=1) + embeddings.position_embeddings
        return positioned + kind


build = partial(build_multimodal, Vilt, ViltParameters)
