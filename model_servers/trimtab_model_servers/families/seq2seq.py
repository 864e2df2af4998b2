"""Encoder-decoder models for summarization and translation: INT64 [B, L] to INT64 [B, max_new_tokens]."""

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field

from trimtab_model_servers.families.architectures import Architecture
from trimtab_model_servers.families.interfaces import Built, Parameters, read_parameters
from trimtab_model_servers.families.pretrained import TRANSFORMERS, architecture_of, build_model
from trimtab_model_servers.families.sequences import NO_TOKEN, model_inputs, pack, resize_width
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint


class Seq2SeqParameters(Parameters):
    """Settings of the family."""

    max_new_tokens: int = Field(default=64, ge=1, le=512, description="Maximum tokens generated")
    max_tokens: int = Field(default=512, ge=8, le=1024, description="Tokens read of a text; the rest is cut")
    beams: int = Field(default=1, ge=1, le=8, description="Beam search width; 1 is greedy")


@dataclass(frozen=True, slots=True)
class Seq2SeqNetwork:
    """A sequence-to-sequence model."""

    model: Any
    architecture: Architecture
    max_tokens: int
    generation_config: Any

    def infer(self, inputs: dict[str, torch.Tensor], point: OperatingPoint) -> dict[str, torch.Tensor]:
        """Map `tokens` [B, L] to the generated `tokens` [B, max_new_tokens]."""
        del point  # a single operating point
        kind = self.architecture
        limit, vocabulary = min(self.max_tokens, kind.positions), self.model.config.vocab_size
        ids, mask = model_inputs(inputs["tokens"], limit, vocabulary, **kind.special_tokens)
        output = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=self.generation_config)
        return {"tokens": generated_tokens(output, self.generation_config)}


def generation_config(model: Any, max_new_tokens: int, beams: int, *, random: bool) -> Any:
    """Generation settings. With random weights the output always has the maximum length."""
    config = model.config
    settings = TRANSFORMERS.GenerationConfig(
        max_new_tokens=max_new_tokens,
        min_new_tokens=max_new_tokens if random else None,
        num_beams=beams,
        do_sample=False,
        bos_token_id=config.bos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    model.generation_config = settings  # else transformers would add settings of the model's configuration
    return settings


def generated_tokens(output: torch.Tensor, settings: Any) -> torch.Tensor:
    """Output of `generate` [B, 1 + L] without special tokens, [B, max_new_tokens]."""
    tokens = output[:, 1:]
    special = (tokens == settings.eos_token_id) | (tokens == settings.pad_token_id) | (tokens == settings.bos_token_id)
    return resize_width(pack(tokens.masked_fill(special, NO_TOKEN)), settings.max_new_tokens)


def build(spec: ModelSpec) -> Built:
    parameters = read_parameters(Seq2SeqParameters, spec)
    model, random = build_model(spec)
    settings = generation_config(model, parameters.max_new_tokens, parameters.beams, random=random)
    return Built.of(Seq2SeqNetwork(model, architecture_of(spec), parameters.max_tokens, settings), random=random)
