"""Extractive question answering: the span of a context that answers a question.

A long context is read in overlapping windows, as published evaluations of SQuAD do.
"""

from typing import Any

import torch
from pydantic import Field

from trimtab_model_servers.errors import InvalidRow
from trimtab_model_servers.families.hf.checkpoint import Checkpoint, TextParameters
from trimtab_model_servers.families.hf.payloads import decode_texts, encode_texts
from trimtab_model_servers.families.hf.task import Tensors
from trimtab_model_servers.families.hf.text import MAX_TOKEN_BYTES, TextTask
from trimtab_pipelines.families import MAX_QUESTION_TOKENS
from trimtab_pipelines.operating_point import OperatingPoint

CONTEXT = 1
"""Number by which a tokenizer marks the second of a pair of texts."""
MAX_WINDOWS = 16
"""Windows of one context; a longer one is refused."""


class AnsweringParameters(TextParameters):
    """Settings of question answering."""

    max_answer_tokens: int = Field(default=15, ge=1, le=512, description="Maximum tokens of an answer")
    max_question_tokens: int = Field(default=MAX_QUESTION_TOKENS, ge=1, le=512, description="Tokens of a question")
    window: int = Field(default=384, ge=32, le=8192, description="Tokens of the question and a part of the context")
    overlap: int = Field(default=128, ge=0, le=4096, description="Tokens that adjacent parts of a context share")


class QuestionAnswering(TextTask):
    """The likeliest answer in each context, with its probability and its characters in the context."""

    auto_class = "AutoModelForQuestionAnswering"
    compiles = True
    parameters = AnsweringParameters

    def __init__(self, checkpoint: Checkpoint, parameters: AnsweringParameters) -> None:
        super().__init__(checkpoint, parameters)
        self._settings = parameters
        self._window = min(parameters.window, self.max_tokens)
        self._room = self._window - self.tokenizer.num_special_tokens_to_add(pair=True)
        self._max_question_tokens = min(parameters.max_question_tokens, self._room // 2)

    def limit(self, name: str) -> float:
        return self._max_question_tokens if name == "question" else MAX_WINDOWS * self._window / 2

    def infer(self, inputs: Tensors, point: OperatingPoint) -> Tensors:
        del point  # a single operating point
        questions = decode_texts("question", inputs["question"], MAX_TOKEN_BYTES * self._max_question_tokens)
        contexts = decode_texts("context", inputs["context"], MAX_TOKEN_BYTES * MAX_WINDOWS * self._window)
        encoded = self._windows(questions, contexts)
        logits = self.model(**{name: encoded[name].to(self.model.device) for name in self.tokenizer.model_input_names})
        windows = range(len(encoded["input_ids"]))
        inside = torch.tensor([[part == CONTEXT for part in encoded.sequence_ids(window)] for window in windows])
        scores, starts, ends = best_spans(
            logits.start_logits.float().cpu(), logits.end_logits.float().cpu(), inside, self._settings.max_answer_tokens
        )
        return self._answers(contexts, encoded, scores, starts, ends)

    def _windows(self, questions: list[str], contexts: list[str]) -> Any:
        """Question and part of a context in each window, padded; InvalidRow if a question or context is too long."""
        lengths = [len(ids) for ids in self.tokenizer(questions, add_special_tokens=False)["input_ids"]]
        if max(lengths) > self._max_question_tokens:
            raise InvalidRow(f"a question has {max(lengths)} tokens; send at most {self._max_question_tokens}")
        encoded = self.tokenizer(
            questions,
            contexts,
            truncation="only_second",
            max_length=self._window,
            stride=min(self._settings.overlap, (self._room - max(lengths)) // 2),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            padding=True,
            return_tensors="pt",
        )
        windows = int(encoded["overflow_to_sample_mapping"].bincount().max())
        if windows > MAX_WINDOWS:
            raise InvalidRow(f"a context has {windows} windows of {self._window} tokens; send at most {MAX_WINDOWS}")
        return encoded

    def _answers(
        self, contexts: list[str], encoded: Any, scores: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
    ) -> Tensors:
        row_of = encoded["overflow_to_sample_mapping"]
        spans = []
        for row in range(len(contexts)):
            windows = (row_of == row).nonzero()[:, 0]
            window = windows[scores[windows].argmax()]
            offsets = encoded["offset_mapping"][window]
            spans.append((float(scores[window]), int(offsets[starts[window], 0]), int(offsets[ends[window], 1])))
        answers = (context[start:end] for context, (_, start, end) in zip(contexts, spans, strict=True))
        return {
            "answer": encode_texts(answers),
            "score": torch.tensor([score for score, _, _ in spans]),
            "start": torch.tensor([start for _, start, _ in spans]),
            "end": torch.tensor([end for _, _, end in spans]),
        }


def best_spans(
    start_logits: torch.Tensor, end_logits: torch.Tensor, inside: torch.Tensor, max_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Probability, first and last token of the likeliest span of each window, within the tokens marked as inside.

    All are [windows, tokens]. A span has at most `max_tokens` tokens. Its probability is the product of the
    probabilities of its ends, each by softmax over the inside tokens.
    """
    start, end = (logits.masked_fill(~inside, -1e4).softmax(dim=-1) for logits in (start_logits, end_logits))
    tokens = inside.shape[1]
    ordered = torch.ones(tokens, tokens, dtype=torch.bool).triu().tril(max_tokens - 1)
    valid = ordered & inside[:, :, None] & inside[:, None, :]
    joint = (start[:, :, None] * end[:, None, :]).masked_fill(~valid, 0.0).flatten(1)
    scores, best = joint.max(dim=1)
    return scores, best // tokens, best % tokens
