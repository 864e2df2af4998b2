"""Text families on transformers: classification, extractive question answering, and generation.

Texts are token ids INT64 [B, L]. Generation is summarization or translation by an encoder-decoder model.
"""

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import max_pool1d, pad

from trimtab_model_servers.families.architectures import Architecture
from trimtab_model_servers.families.interfaces import Built, Parameters, read_parameters
from trimtab_model_servers.families.pretrained import architecture_of, build_model
from trimtab_model_servers.families.sequences import (
    NO_TOKEN,
    frame,
    model_inputs,
    pack,
    pad_tokens,
    replace_unknown,
    resize_width,
    token_counts,
)
from trimtab_model_servers.families.transformers_package import TRANSFORMERS
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint

QUESTION_TOKENS = 64


class ClassifierParameters(Parameters):
    """Settings of classification."""

    labels: int = Field(default=2, ge=2, le=1000, description="Number of classes")
    max_tokens: int = Field(default=512, ge=8, le=512, description="Tokens read of a text; the rest is cut")


@dataclass(frozen=True, slots=True)
class TextClassifier:
    """An encoder with a classification head."""

    model: Any
    architecture: Architecture
    max_tokens: int

    def infer(self, inputs: dict[str, Tensor], point: OperatingPoint) -> dict[str, Tensor]:
        """Map `tokens` [B, L] to `label` [B] and `confidence` [B]."""
        del point  # a single operating point
        vocabulary, special_tokens = self.model.config.vocab_size, self.architecture.special_tokens
        ids, mask = model_inputs(inputs["tokens"], self.max_tokens, vocabulary, **special_tokens)
        confidence, label = self.model(input_ids=ids, attention_mask=mask).logits.softmax(dim=-1).max(dim=-1)
        return {"label": label, "confidence": confidence}


class QuestionAnsweringParameters(Parameters):
    """Settings of question answering."""

    max_tokens: int = Field(default=384, ge=96, le=512, description="Tokens read; the rest is cut")
    max_answer_tokens: int = Field(default=30, ge=1, le=512, description="Maximum tokens of an answer")


@dataclass(frozen=True, slots=True)
class QuestionAnswerer:
    """An encoder that scores each token of the context as the first and the last of the answer."""

    model: Any
    architecture: Architecture
    max_tokens: int
    max_answer_tokens: int

    def infer(self, inputs: dict[str, Tensor], point: OperatingPoint) -> dict[str, Tensor]:
        """Map `question` and `context` [B, L] to `start`, `end` [B], token indices in the context, and `score` [B].

        Indices count tokens without padding; `end` is inclusive. An empty context gives -1, -1 and score 0.
        """
        del point  # a single operating point
        kind = self.architecture
        vocabulary = self.model.config.vocab_size
        question = replace_unknown(pack(inputs["question"], QUESTION_TOKENS), vocabulary, kind.unknown)
        room = self.max_tokens - QUESTION_TOKENS - len(kind.begin) - len(kind.between) - len(kind.end)
        context = replace_unknown(pack(inputs["context"], room), vocabulary, kind.unknown)
        ids, mask = pad_tokens(frame([kind.begin, question, kind.between, context, kind.end]), kind.padding)
        output = self.model(input_ids=ids, attention_mask=mask)
        offset = token_counts(question) + len(kind.begin) + len(kind.between)
        starts, ends = (
            _within(logits, offset, token_counts(context)) for logits in (output.start_logits, output.end_logits)
        )
        return best_spans(starts.log_softmax(dim=1), ends.log_softmax(dim=1), offset, self.max_answer_tokens)


def _within(logits: Tensor, first: Tensor, count: Tensor) -> Tensor:
    """Mask the logits [B, L] outside `count` [B] positions from `first` [B]."""
    position = torch.arange(logits.shape[1])
    inside = (position >= first[:, None]) & (position < (first + count)[:, None])
    return logits.masked_fill(~inside, -torch.inf)


def best_spans(starts: Tensor, ends: Tensor, first: Tensor, max_tokens: int) -> dict[str, Tensor]:
    """The likeliest span of each row with at most `max_tokens` tokens.

    `starts` and `ends` are log-probabilities of each position [B, L] as first and last token, NaN in empty rows;
    `first` [B] is the start of the context.
    """
    starts, ends = starts.nan_to_num(nan=-torch.inf), ends.nan_to_num(nan=-torch.inf)
    shifted = pad(starts, (max_tokens - 1, 0), value=-torch.inf)  # a window ends at the end of its span
    best, window = max_pool1d(shifted[:, None], max_tokens, stride=1, return_indices=True)
    total, end = (best[:, 0] + ends).max(dim=1)
    start = window[:, 0].gather(1, end[:, None])[:, 0] - (max_tokens - 1)
    empty = total == -torch.inf
    return {
        "start": (start - first).masked_fill(empty, -1),
        "end": (end - first).masked_fill(empty, -1),
        "score": total.exp(),
    }


class Seq2SeqParameters(Parameters):
    """Settings of generation."""

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

    def infer(self, inputs: dict[str, Tensor], point: OperatingPoint) -> dict[str, Tensor]:
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


def generated_tokens(output: Tensor, settings: Any) -> Tensor:
    """Output of `generate` [B, 1 + L] without special tokens, [B, max_new_tokens]."""
    tokens = output[:, 1:]
    special = (tokens == settings.eos_token_id) | (tokens == settings.pad_token_id) | (tokens == settings.bos_token_id)
    return resize_width(pack(tokens.masked_fill(special, NO_TOKEN)), settings.max_new_tokens)


def build(spec: ModelSpec) -> Built:
    architecture = architecture_of(spec)
    network: TextClassifier | QuestionAnswerer | Seq2SeqNetwork
    if architecture.task == "classification":
        classifier = read_parameters(ClassifierParameters, spec)
        model, random = build_model(spec, num_labels=classifier.labels)
        network = TextClassifier(model, architecture, classifier.max_tokens)
    elif architecture.task == "question-answering":
        answerer = read_parameters(QuestionAnsweringParameters, spec)
        model, random = build_model(spec)
        network = QuestionAnswerer(model, architecture, answerer.max_tokens, answerer.max_answer_tokens)
    else:
        writer = read_parameters(Seq2SeqParameters, spec)
        model, random = build_model(spec)
        settings = generation_config(model, writer.max_new_tokens, writer.beams, random=random)
        network = Seq2SeqNetwork(model, architecture, writer.max_tokens, settings)
    return Built.of(network, random=random)
