"""Extractive question answering: a question and a context, INT64 [B, L] each, to the answer's span in the context."""

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import max_pool1d, pad

from trimtab_model_servers.families.architectures import Architecture
from trimtab_model_servers.families.interfaces import Built, Parameters, read_parameters
from trimtab_model_servers.families.pretrained import architecture_of, build_model
from trimtab_model_servers.families.sequences import frame, pack, pad_tokens, replace_unknown, token_counts
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint

QUESTION_TOKENS = 64


class QuestionAnsweringParameters(Parameters):
    """Settings of the family."""

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

    Args:
        starts: log-probability of each position [B, L] as first token; NaN in empty rows.
        ends: log-probability of each position as last token.
        first: start of each row's context, [B].
        max_tokens: maximum length of a span.
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


def build(spec: ModelSpec) -> Built:
    parameters = read_parameters(QuestionAnsweringParameters, spec)
    model, random = build_model(spec)
    served = QuestionAnswerer(model, architecture_of(spec), parameters.max_tokens, parameters.max_answer_tokens)
    return Built.of(served, random=random)
