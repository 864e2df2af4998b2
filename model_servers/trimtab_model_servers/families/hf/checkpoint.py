"""Checkpoints: folders in the Hugging Face Hub's layout, loaded by transformers' Auto classes.

Weights are read from safetensors only, and no code of a checkpoint is executed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.interfaces import Parameters
from trimtab_model_servers.families.transformers_package import TRANSFORMERS
from trimtab_model_servers.int8 import quantize_linear_layers
from trimtab_model_servers.weights.files import CONFIG_FILE
from trimtab_model_servers.weights.source import find_folder
from trimtab_pipelines.model_spec import ModelSpec

Precision = Literal["FP32", "BF16", "FP16", "INT8"]
Compiler = Literal["none", "torch.compile"]
DTYPES = {"FP32": torch.float32, "BF16": torch.bfloat16, "FP16": torch.float16, "INT8": torch.float32}
"""Of weights; INT8 rounds those of linear layers."""
_UNBOUNDED_TOKENS = 10**6
"""A tokenizer without a limit states a much larger one."""


class TaskParameters(Parameters):
    """Settings of every task."""

    precision: Precision = Field(default="FP32", description="Of weights and computation; INT8 on cores alone")
    compile: Compiler = Field(default="none", description="What compiles the model before the replica is ready")


class TextParameters(TaskParameters):
    """Settings of tasks that read text."""

    max_tokens: int | None = Field(default=None, ge=1, description="Tokens of a text; default: the checkpoint's limit")
    truncate: bool = Field(default=False, description="Cut longer texts instead of refusing them")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with the configuration, tokenizer or processor, and weights of one model."""

    folder: Path
    config: Any
    outputs: frozenset[str]
    """Outputs that the stage has."""

    @classmethod
    def open(cls, spec: ModelSpec) -> "Checkpoint":
        """Fetch the folder of a variant if necessary, and read its configuration; raises ModelError."""
        folder = find_folder(spec.storage_uri, spec.digest)
        if folder is None:
            raise ModelError(
                f"family {spec.family!r}: {spec.storage_uri} is no checkpoint; give a folder with {CONFIG_FILE}, the "
                "tokenizer or processor and safetensors: a path, s3://BUCKET/PREFIX or hf://OWNER/NAME@COMMIT"
            )
        return cls(
            folder, cls._read(folder, "AutoConfig", CONFIG_FILE), frozenset(tensor.name for tensor in spec.outputs)
        )

    def model(self, auto_class: str, precision: Precision) -> Any:
        """The model for a task, by the name of its Auto class; ModelError if a tensor is missing or does not fit."""
        TRANSFORMERS.utils.logging.disable_progress_bar()
        try:
            model, report = getattr(TRANSFORMERS, auto_class).from_pretrained(
                self.folder,
                config=self.config,
                dtype=DTYPES[precision],
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        except Exception as error:  # every library below has its own
            raise ModelError(f"{self.folder}: {auto_class}: {_first_line(error)}") from error
        for name, actual, expected in sorted(report["mismatched_keys"]):
            raise ModelError(
                f"{self.folder}: tensor {name!r} has shape {list(actual)}; {CONFIG_FILE} requires {list(expected)}"
            )
        for name in sorted(report["missing_keys"]):
            raise ModelError(
                f"{self.folder}: tensor {name!r} is missing; the checkpoint is of {self._architectures()}, "
                f"and the family needs {type(model).__name__}"
            )
        if precision == "INT8" and not quantize_linear_layers(model):
            raise ModelError(f"parameters.precision INT8: {type(model).__name__} has no linear layers; remove it")
        return model.eval().requires_grad_(requires_grad=False)

    def tokenizer(self) -> Any:
        """The tokenizer; ModelError if it has tokens without an embedding in the model."""
        tokenizer = self._read(self.folder, "AutoTokenizer", "the tokenizer")
        vocabulary = getattr(self.config.get_text_config(), "vocab_size", None)
        if vocabulary is not None and len(tokenizer) > vocabulary:
            raise ModelError(
                f"{self.folder}: the tokenizer has {len(tokenizer)} tokens, the model's vocabulary {vocabulary}; "
                "they belong to different checkpoints"
            )
        return tokenizer

    def image_processor(self) -> Any:
        return self._read(self.folder, "AutoImageProcessor", "the image processor")

    def feature_extractor(self) -> Any:
        return self._read(self.folder, "AutoFeatureExtractor", "the feature extractor")

    def max_tokens(self, tokenizer: Any, parameters: TextParameters) -> int:
        """Tokens of the longest text; ModelError if a variant sets more than the checkpoint has positions."""
        stated = [tokenizer.model_max_length, getattr(self.config, "max_position_embeddings", None)]
        limits = [int(limit) for limit in stated if limit is not None and 0 < limit < _UNBOUNDED_TOKENS]
        limit = min(limits, default=_UNBOUNDED_TOKENS)
        if parameters.max_tokens is None:
            return limit
        if parameters.max_tokens > limit:
            raise ModelError(f"parameters.max_tokens {parameters.max_tokens} exceeds the checkpoint's {limit}")
        return parameters.max_tokens

    def _architectures(self) -> str:
        return ", ".join(self.config.architectures or ()) or f"type {self.config.model_type}"

    @staticmethod
    def _read(folder: Path, auto_class: str, what: str) -> Any:
        try:
            return getattr(TRANSFORMERS, auto_class).from_pretrained(folder, local_files_only=True)
        except Exception as error:  # every file format has its own
            raise ModelError(f"{folder}: {what} cannot be read: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
