"""Text tasks: classification of texts and of their tokens, generation of text from text, and embeddings.

A batch is padded to its longest text and masked. Texts are UTF-8 in BYTES tensors; a text above the limit of tokens is
refused, or cut if the variant says so.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from trimtab_model_servers.errors import InvalidRow
from trimtab_model_servers.families.hf.checkpoint import Checkpoint, TextParameters
from trimtab_model_servers.families.hf.payloads import counts, decode_texts, encode_texts
from trimtab_model_servers.families.transformers_package import TRANSFORMERS
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_protocol.tensors import Array

MAX_TOKEN_BYTES = 64
"""A text with more bytes per token of the limit is refused before it is tokenized."""
EXAMPLE_TEXT = "The pilot answered calmly, and the plane landed on the river a few minutes later."
Tensors = dict[str, Any]
Declared = dict[str, tuple[str, tuple[int, ...]]]


class TextTask:
    """A model that reads one text per row."""

    auto_class: ClassVar[str]
    inputs: ClassVar[Declared] = {"text": ("BYTES", ())}
    outputs: ClassVar[Declared]
    parameters: ClassVar[type[TextParameters]] = TextParameters

    def __init__(self, checkpoint: Checkpoint, parameters: Any) -> None:
        self.tokenizer = checkpoint.tokenizer()
        self.max_tokens = checkpoint.max_tokens(self.tokenizer, parameters)
        self.truncate = bool(parameters.truncate)
        self.model = checkpoint.model(self.auto_class, parameters.precision)

    def move_to(self, device: torch.device) -> None:
        self.model.to(device)

    def example(self, name: str) -> bytes:
        del name
        return EXAMPLE_TEXT.encode()

    def read(self, rows: Array) -> list[str]:
        return decode_texts("text", rows, MAX_TOKEN_BYTES * self.max_tokens)

    def encode(self, texts: Sequence[str]) -> Any:
        """Token ids and masks [rows, longest] on the model's device; InvalidRow if a text is too long."""
        limit = {"truncation": True, "max_length": self.max_tokens} if self.truncate else {}
        encoded = self.tokenizer(list(texts), padding=True, return_tensors="pt", **limit)
        if (longest := int(encoded["attention_mask"].sum(dim=1).max())) > self.max_tokens:
            raise InvalidRow(f"a text has {longest} tokens; send at most {self.max_tokens}")
        return encoded.to(self.model.device)


class TextClassification(TextTask):
    """The likeliest label of each text, with its probability."""

    auto_class = "AutoModelForSequenceClassification"
    outputs: ClassVar[Declared] = {"label": ("BYTES", ()), "score": ("FP32", ())}

    def infer(self, inputs: Tensors, point: OperatingPoint) -> Tensors:
        del point  # a single operating point
        logits = self.model(**self.encode(self.read(inputs["text"]))).logits.float()
        return best_labels(self.model.config, probabilities(self.model.config, logits))


def probabilities(config: Any, logits: torch.Tensor) -> torch.Tensor:
    """Scores [rows, labels]: sigmoid if labels do not exclude each other, the logits of a regression, else softmax."""
    if config.problem_type == "regression":
        return logits
    if config.problem_type == "multi_label_classification" or config.num_labels == 1:
        return logits.sigmoid()
    return logits.softmax(dim=-1)


def best_labels(config: Any, scores: torch.Tensor) -> Tensors:
    score, label = scores.max(dim=-1)
    return {"label": encode_texts(config.id2label[index] for index in label.tolist()), "score": score}


class TokenClassification(TextTask):
    """The entities of each text, of adjacent tokens with the same label: transformers' `simple` aggregation."""

    auto_class = "AutoModelForTokenClassification"
    outputs: ClassVar[Declared] = {
        "entities": ("INT64", ()),
        "label": ("BYTES", ()),
        "word": ("BYTES", ()),
        "score": ("FP32", ()),
        "start": ("INT64", ()),
        "end": ("INT64", ()),
    }

    def __init__(self, checkpoint: Checkpoint, parameters: Any) -> None:
        super().__init__(checkpoint, parameters)
        self._pipeline = TRANSFORMERS.TokenClassificationPipeline(
            model=self.model, tokenizer=self.tokenizer, aggregation_strategy="simple", device=-1
        )

    def move_to(self, device: torch.device) -> None:
        super().move_to(device)
        self._pipeline.device = device

    def infer(self, inputs: Tensors, point: OperatingPoint) -> Tensors:
        del point  # a single operating point
        texts = self.read(inputs["text"])
        self.encode(texts)  # refuses what is too long
        found = self._pipeline(texts, batch_size=len(texts))
        entities = [entity for row in found for entity in row]
        return {
            "entities": counts(map(len, found)),
            "label": encode_texts(entity["entity_group"] for entity in entities),
            "word": encode_texts(entity["word"] for entity in entities),
            "score": torch.tensor([float(entity["score"]) for entity in entities], dtype=torch.float32),
            "start": torch.tensor([entity["start"] for entity in entities], dtype=torch.int64),
            "end": torch.tensor([entity["end"] for entity in entities], dtype=torch.int64),
        }


class GenerationParameters(TextParameters):
    """Settings of summarization and translation."""

    prefix: str = Field(default="", max_length=256, description="Put before each text, such as `summarize: `")
    max_new_tokens: int | None = Field(default=None, ge=1, le=4096, description="Default: the checkpoint's setting")
    beams: int | None = Field(default=None, ge=1, le=8, description="Default: the checkpoint's setting")


class TextToText(TextTask):
    """Text generated from a text by an encoder-decoder model: summarization and translation."""

    auto_class = "AutoModelForSeq2SeqLM"
    outputs: ClassVar[Declared] = {"text": ("BYTES", ())}
    parameters = GenerationParameters

    def __init__(self, checkpoint: Checkpoint, parameters: GenerationParameters) -> None:
        super().__init__(checkpoint, parameters)
        self._prefix = parameters.prefix
        chosen = {"max_new_tokens": parameters.max_new_tokens, "num_beams": parameters.beams}
        self._settings = {name: value for name, value in chosen.items() if value is not None}

    def infer(self, inputs: Tensors, point: OperatingPoint) -> Tensors:
        del point  # a single operating point
        texts = [self._prefix + text for text in self.read(inputs["text"])]
        generated = self.model.generate(**self.encode(texts), do_sample=False, **self._settings)
        return {"text": encode_texts(self.tokenizer.batch_decode(generated, skip_special_tokens=True))}


class EmbeddingParameters(TextParameters):
    """Settings of text embeddings."""

    pooling: Literal["mean", "first", "last"] = Field(default="mean", description="Of the tokens' states")
    normalize: bool = Field(default=True, description="Scale embeddings to length 1")


class TextEmbedding(TextTask):
    """An embedding of each text."""

    auto_class = "AutoModel"
    outputs: ClassVar[Declared] = {"embedding": ("FP32", (-1,))}
    parameters = EmbeddingParameters

    def __init__(self, checkpoint: Checkpoint, parameters: EmbeddingParameters) -> None:
        super().__init__(checkpoint, parameters)
        self._pooling, self._normalize = parameters.pooling, parameters.normalize

    def infer(self, inputs: Tensors, point: OperatingPoint) -> Tensors:
        del point  # a single operating point
        encoded = self.encode(self.read(inputs["text"]))
        states = self.model(**encoded).last_hidden_state.float()
        pooled = pool(states, encoded["attention_mask"], self._pooling)
        return {"embedding": torch.nn.functional.normalize(pooled, dim=-1) if self._normalize else pooled}


def pool(states: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """Reduce states [rows, tokens, width] to [rows, width]; padding does not count."""
    if pooling == "mean":
        weights = mask[..., None].float()
        return (states * weights).sum(dim=1) / weights.sum(dim=1)
    positions = torch.arange(mask.shape[1], device=mask.device)
    chosen = torch.where(mask.bool(), positions, -1).argmax(dim=1) if pooling == "last" else mask.argmax(dim=1)
    return states[torch.arange(len(states), device=states.device), chosen]
