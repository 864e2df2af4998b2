"""Text classification (sentiment, language): token ids INT64 [B, L] to label and confidence."""

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field

from trimtab_model_servers.families.architectures import Architecture
from trimtab_model_servers.families.interfaces import Built, Parameters, read_parameters
from trimtab_model_servers.families.pretrained import architecture_of, build_model
from trimtab_model_servers.families.sequences import model_inputs
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint


class ClassifierParameters(Parameters):
    """Settings of the family."""

    labels: int = Field(default=2, ge=2, le=1000, description="Number of classes")
    max_tokens: int = Field(default=512, ge=8, le=512, description="Tokens read of a text; the rest is cut")


@dataclass(frozen=True, slots=True)
class TextClassifier:
    """An encoder with a classification head."""

    model: Any
    architecture: Architecture
    max_tokens: int

    def infer(self, inputs: dict[str, torch.Tensor], point: OperatingPoint) -> dict[str, torch.Tensor]:
        """Map `tokens` [B, L] to `label` [B] and `confidence` [B]."""
        del point  # a single operating point
        vocabulary, special_tokens = self.model.config.vocab_size, self.architecture.special_tokens
        ids, mask = model_inputs(inputs["tokens"], self.max_tokens, vocabulary, **special_tokens)
        confidence, label = self.model(input_ids=ids, attention_mask=mask).logits.softmax(dim=-1).max(dim=-1)
        return {"label": label, "confidence": confidence}


def build(spec: ModelSpec) -> Built:
    parameters = read_parameters(ClassifierParameters, spec)
    model, random = build_model(spec, num_labels=parameters.labels)
    served = TextClassifier(model, architecture_of(spec), parameters.max_tokens)
    return Built.of(served, random=random)
