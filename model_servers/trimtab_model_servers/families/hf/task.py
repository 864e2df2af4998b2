"""Base class of the tasks, and answers that several tasks give."""

from collections.abc import Mapping
from math import inf
from typing import Any, ClassVar

import numpy as np
import torch

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.hf.checkpoint import Checkpoint, TaskParameters
from trimtab_model_servers.families.hf.payloads import encode_texts
from trimtab_model_servers.transformer.compiled import compiler_problem
from trimtab_model_servers.weights.loading import CPU
from trimtab_pipelines.families import Medium
from trimtab_pipelines.synthetic_inputs import default_law

Tensors = dict[str, Any]


class Task:
    """A model of one task that reads values of one medium."""

    medium: ClassVar[Medium]
    auto_class: str
    parameters: ClassVar[type[TaskParameters]] = TaskParameters
    example_size: ClassVar[int] = 1
    """Size of the open dimensions of an array that the model warms up with."""
    compiles: ClassVar[bool] = False
    """Whether one graph of a compiled model serves all numbers and lengths of rows, and another one a single row."""

    def __init__(self, checkpoint: Checkpoint, parameters: Any) -> None:
        self.model = checkpoint.model(self.auto_class, parameters.precision)
        self._int8 = parameters.precision == "INT8"
        self.compiled = parameters.compile != "none"
        if self.compiled:
            if problem := compiler_problem() if self.compiles else "models of this task are not compiled; remove it":
                raise ModelError(f"parameters.compile torch.compile: {problem}")
            self.model.compile(dynamic=True)

    def limit(self, name: str) -> float:
        """Tokens or seconds of the longest value of an input."""
        del name
        return inf

    def example(self, name: str) -> bytes:
        return default_law(self.medium, self.limit(name)).draw_value(np.random.default_rng(0))

    def move_to(self, device: torch.device) -> None:
        if self._int8 and device != CPU:
            raise ModelError(
                "parameters.precision INT8 is computed on cores alone; choose another, or remove resources.gpu"
            )
        self.model.to(device)


def best_labels(labels: Mapping[int, str], scores: torch.Tensor) -> Tensors:
    """The label with the highest score of each row [rows, labels], and the score."""
    score, label = scores.max(dim=-1)
    return {"label": encode_texts(labels[index] for index in label.tolist()), "score": score}


def probabilities(config: Any, logits: torch.Tensor) -> torch.Tensor:
    """Scores [rows, labels]: sigmoid if labels do not exclude each other, the logits of a regression, else softmax."""
    if config.problem_type == "regression":
        return logits
    if config.problem_type == "multi_label_classification" or config.num_labels == 1:
        return logits.sigmoid()
    return logits.softmax(dim=-1)


def embeddings(states: torch.Tensor, *, normalize: bool) -> Tensors:
    return {"embedding": torch.nn.functional.normalize(states, dim=-1) if normalize else states}
