"""Question answering: a question and its context, INT64 [B, L] each, to where in the context the answer is."""

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import max_pool1d, pad

from trimtab_model_servers.families.architectures import Architecture
from trimtab_model_servers.families.interfaces import Built
from trimtab_model_servers.families.parameters import Parameters, read_parameters
from trimtab_model_servers.families.pretrained import architecture_of, build_model
from trimtab_model_servers.families.sequences import framed, known, lengths, packed, padded
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint

QUESTION_TOKENS = 64


class AnswerParameters(Parameters):
    """Settings of the family."""

    max_tokens: int = Field(default=384, ge=96, le=512, description="Tokens read; what is beyond is cut")
    max_answer_tokens: int = Field(default=30, ge=1, le=512, description="Longest answer")


@dataclass(frozen=True, slots=True)
class QuestionAnswerer:
    """An encoder that scores each token of the context as the answer's first and last."""

    model: Any
    architecture: Architecture
    max_tokens: int
    max_answer_tokens: int

    def infer(self, inputs: dict[str, Tensor], point: OperatingPoint) -> dict[str, Tensor]:
        """Map `question` and `context` [B, L] to `start`, `end` [B], token indices in the context, and `score` [B].

        Indices count tokens, not padding; the answer includes `end`. An empty context has -1, -1 and score 0.
        """
        del point  # one way to run
        kind = self.architecture
        question = known(packed(inputs["question"], QUESTION_TOKENS), self.model.config.vocab_size, kind.unknown)
        room = self.max_tokens - QUESTION_TOKENS - len(kind.begin) - len(kind.between) - len(kind.end)
        context = known(packed(inputs["context"], room), self.model.config.vocab_size, kind.unknown)
        ids, mask = padded(framed([kind.begin, question, kind.between, context, kind.end]), kind.padding)
        told = self.model(input_ids=ids, attention_mask=mask)
        before = lengths(question) + len(kind.begin) + len(kind.between)
        starts, ends = (_within(logits, before, lengths(context)) for logits in (told.start_logits, told.end_logits))
        return best_spans(starts.log_softmax(dim=1), ends.log_softmax(dim=1), before, self.max_answer_tokens)


def _within(logits: Tensor, first: Tensor, count: Tensor) -> Tensor:
    """Leave only the logits [B, L] of `count` [B] places from `first` [B] on."""
    place = torch.arange(logits.shape[1])
    inside = (place >= first[:, None]) & (place < (first + count)[:, None])
    return logits.masked_fill(~inside, -torch.inf)


def best_spans(starts: Tensor, ends: Tensor, first: Tensor, most: int) -> dict[str, Tensor]:
    """Choose each row's greedy_tokens span of at most `most` tokens.

    Args:
        starts: log-probability of each place [B, L] as first token; NaN in rows without any.
        ends: the same as last token.
        first: where each row's context begins, [B].
        most: longest span.
    """
    starts, ends = starts.nan_to_num(nan=-torch.inf), ends.nan_to_num(nan=-torch.inf)
    behind = pad(starts, (most - 1, 0), value=-torch.inf)  # so that a window ends where the span does
    best, window = max_pool1d(behind[:, None], most, stride=1, return_indices=True)
    total, end = (best[:, 0] + ends).max(dim=1)
    start = window[:, 0].gather(1, end[:, None])[:, 0] - (most - 1)
    empty = total == -torch.inf
    return {
        "start": (start - first).masked_fill(empty, -1),
        "end": (end - first).masked_fill(empty, -1),
        "score": total.exp(),
    }


def build(spec: ModelSpec) -> Built:
    """Build the model that the family's name ends in."""
    parameters = read_parameters(AnswerParameters, spec)
    model, random = build_model(spec)
    served = QuestionAnswerer(model, architecture_of(spec), parameters.max_tokens, parameters.max_answer_tokens)
    return Built(served, "random" if random else "stored")
