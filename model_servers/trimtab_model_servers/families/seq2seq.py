"""Encoders with a decoder that writes, for summaries and translations: INT64 [B, L] to INT64 [B, max_new_tokens]."""

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field

from trimtab_model_servers.families.architectures import Architecture
from trimtab_model_servers.families.interfaces import Built
from trimtab_model_servers.families.parameters import Parameters, read_parameters
from trimtab_model_servers.families.pretrained import TRANSFORMERS, architecture_of, build_model
from trimtab_model_servers.families.sequences import NO_TOKEN, framed, known, packed, padded, widened
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint


class WriterParameters(Parameters):
    """Settings of the family."""

    max_new_tokens: int = Field(default=64, ge=1, le=512, description="Tokens written at most")
    max_tokens: int = Field(default=512, ge=8, le=1024, description="Tokens read of a text; what is beyond is cut")
    beams: int = Field(default=1, ge=1, le=8, description="Drafts kept while writing; 1 is greedy")


@dataclass(frozen=True, slots=True)
class Seq2SeqNetwork:
    """A sequence-to-sequence model."""

    model: Any
    architecture: Architecture
    max_tokens: int
    plan: Any

    def infer(self, inputs: dict[str, torch.Tensor], point: OperatingPoint) -> dict[str, torch.Tensor]:
        """Map `tokens` [B, L] to what is written, `tokens` [B, max_new_tokens]."""
        del point  # one way to run
        kind = self.architecture
        room = min(self.max_tokens, kind.positions) - len(kind.begin) - len(kind.end)
        text = known(packed(inputs["tokens"], room), self.model.config.vocab_size, kind.unknown)
        ids, mask = padded(framed([kind.begin, text, kind.end]), kind.padding)
        written = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=self.plan)
        return {"tokens": text_of(written, self.plan)}


def generation_config(model: Any, max_new_tokens: int, beams: int, *, random: bool) -> Any:
    """How to write. Random weights end a text anywhere or nowhere; they always write as much as they may."""
    config = model.config
    plan = TRANSFORMERS.GenerationConfig(
        max_new_tokens=max_new_tokens,
        min_new_tokens=max_new_tokens if random else None,
        num_beams=beams,
        do_sample=False,
        bos_token_id=config.bos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    model.generation_config = plan  # transformers would else mix in what the configuration says
    return plan


def text_of(written: torch.Tensor, plan: Any) -> torch.Tensor:
    """What was written [B, 1 + L] without its special tokens, [B, max_new_tokens]."""
    tokens = written[:, 1:]
    special = (tokens == plan.eos_token_id) | (tokens == plan.pad_token_id) | (tokens == plan.bos_token_id)
    return widened(packed(tokens.masked_fill(special, NO_TOKEN)), plan.max_new_tokens)


def build(spec: ModelSpec) -> Built:
    """Build the model that the family's name ends in."""
    parameters = read_parameters(WriterParameters, spec)
    model, random = build_model(spec)
    plan = generation_config(model, parameters.max_new_tokens, parameters.beams, random=random)
    return Built(
        Seq2SeqNetwork(model, architecture_of(spec), parameters.max_tokens, plan), "random" if random else "stored"
    )
