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
from trimtab_model_servers.families.hf.task import Task, Tensors, best_labels, embeddings, probabilities
from trimtab_model_servers.families.transformers_package import TRANSFORMERS
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_protocol.tensors import Array

MAX_TOKEN_BYTES = 64
"""A text with more bytes per token of the limit is refused before it is tokenized."""


class TextTask(Task):
    """A model that reads one text per row."""

    medium = "text"
    parameters: ClassVar[type[TextParameters]] = TextParameters

    def __init__(self, checkpoint: Checkpoint, parameters: Any) -> None:
        self.tokenizer = checkpoint.tokenizer()
        self.max_tokens = checkpoint.max_tokens(self.tokenizer, parameters)
        self.truncate = bool(parameters.truncate)
        super().__init__(checkpoint, parameters)

    def limit(self, name: str) -> float:
        del name
        return self.max_tokens

    def read(self, rows: Array) -> list[str]:
        """Texts, perhaps empty: a transcriber that hears nothing sends such a text to the next stage."""
        return decode_texts("text", rows, MAX_TOKEN_BYTES * self.max_tokens, min_bytes=0)

    def encode(self, texts: Sequence[str]) -> Any:
        """Token ids and masks [rows, longest] on the model's device; InvalidRow as of `tokenize`."""
        return self.tokenize(texts).to(self.model.device)

    def tokenize(self, texts: Sequence[str], **further: bool) -> Any:
        """Token ids and masks [rows, longest]; InvalidRow if a text is too long or has no token."""
        limit = {"truncation": True, "max_length": self.max_tokens} if self.truncate else {}
        encoded = self.tokenizer(list(texts), padding=True, return_tensors="pt", **limit, **further)
        lengths = encoded["attention_mask"].sum(dim=1)
        if not lengths.all():
            raise InvalidRow("a text is empty; send text")
        if (longest := int(lengths.max())) > self.max_tokens:
            raise InvalidRow(f"a text has {longest} tokens; send at most {self.max_tokens}")
        return encoded


class TextClassification(TextTask):
    """The likeliest label of each text, with its probability."""

    auto_class = "AutoModelForSequenceClassification"
    compiles = True

    def infer(self, inputs: Tensors, point: OperatingPoint) -> Tensors:
        del point  # a single operating point
        logits = self.model(**self.encode(self.read(inputs["text"]))).logits.float()
        return best_labels(self.model.config.id2label, probabilities(self.model.config, logits))


class TokenClassification(TextTask):
    """The entities of each text, of adjacent tokens with the same label: transformers' `simple` aggregation."""

    auto_class = "AutoModelForTokenClassification"
    compiles = True

    def __init__(self, checkpoint: Checkpoint, parameters: Any) -> None:
        super().__init__(checkpoint, parameters)
        self._pipeline = TRANSFORMERS.TokenClassificationPipeline(
            model=self.model, tokenizer=self.tokenizer, aggregation_strategy="simple", device=-1
        )

    def infer(self, inputs: Tensors, point: OperatingPoint) -> Tensors:
        del point  # a single operating point
        texts = self.read(inputs["text"])
        encoded = self.tokenize(texts, return_special_tokens_mask=True, return_offsets_mapping=True)
        described = {name: encoded.pop(name) for name in ("special_tokens_mask", "offset_mapping")}
        described["input_ids"] = encoded["input_ids"]
        described["logits"] = self.model(**encoded.to(self.model.device)).logits.float().cpu()
        rows = [
            self._pipeline.postprocess(
                [{"sentence": text} | {name: tensor[row : row + 1] for name, tensor in described.items()}],
                **self._pipeline._postprocess_params,  # noqa: SLF001 - the aggregation
            )
            for row, text in enumerate(texts)
        ]
        entities = [entity for row in rows for entity in row]
        return {
            "entities": counts(map(len, rows)),
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
    parameters = GenerationParameters

    def __init__(self, checkpoint: Checkpoint, parameters: GenerationParameters) -> None:
        super().__init__(checkpoint, parameters)
        self._prefix = parameters.prefix
        chosen = {"max_new_tokens": parameters.max_new_tokens, "num_beams": parameters.beams}
        self._settings = {name: value for name, value in chosen.items() if value is not None}

    def infer(self, inputs: Tensors, point: OperatingPoint) -> Tensors:
        del point  # a single operating point
        return {"text": encode_texts(self.generate(self.read(inputs["text"])))}

    def generate(self, texts: Sequence[str]) -> list[str]:
        encoded = self.encode([self._prefix + text for text in texts])
        generated = self.model.generate(**encoded, do_sample=False, **self._settings)
        decoded: list[str] = self.tokenizer.batch_decode(generated, skip_special_tokens=True)
        return decoded


class TranslationParameters(GenerationParameters):
    """Settings of translation."""

    language: str = Field(default="", max_length=64, description="Only texts whose `language` is this are translated")


class Translation(TextToText):
    """Translations; texts that an earlier stage found to be of another language are returned as they are."""

    parameters = TranslationParameters

    def __init__(self, checkpoint: Checkpoint, parameters: TranslationParameters) -> None:
        super().__init__(checkpoint, parameters)
        self._language = parameters.language.encode()

    def infer(self, inputs: Tensors, point: OperatingPoint) -> Tensors:
        del point  # a single operating point
        texts = self.read(inputs["text"])
        languages = inputs["language"] if self._language and "language" in inputs else [self._language] * len(texts)
        foreign = [row for row, language in enumerate(languages) if language == self._language]
        if foreign:
            for row, translation in zip(foreign, self.generate([texts[row] for row in foreign]), strict=True):
                texts[row] = translation
        return {"text": encode_texts(texts)}


class EmbeddingParameters(TextParameters):
    """Settings of text embeddings."""

    pooling: Literal["mean", "first", "last"] = Field(default="mean", description="Of the tokens' states")
    normalize: bool = Field(default=True, description="Scale embeddings to length 1")


class TextEmbedding(TextTask):
    """An embedding of each text."""

    auto_class = "AutoModel"
    compiles = True
    parameters = EmbeddingParameters

    def __init__(self, checkpoint: Checkpoint, parameters: EmbeddingParameters) -> None:
        super().__init__(checkpoint, parameters)
        self._pooling, self._normalize = parameters.pooling, parameters.normalize

    def infer(self, inputs: Tensors, point: OperatingPoint) -> Tensors:
        del point  # a single operating point
        encoded = self.encode(self.read(inputs["text"]))
        states = self.model(**encoded).last_hidden_state.float()
        return embeddings(pool(states, encoded["attention_mask"], self._pooling), normalize=self._normalize)


def pool(states: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """Reduce states [rows, tokens, width] to [rows, width]; padding does not count."""
    if pooling == "mean":
        weights = mask[..., None].float()
        return (states * weights).sum(dim=1) / weights.sum(dim=1)
    positions = torch.arange(mask.shape[1], device=mask.device)
    chosen = torch.where(mask.bool(), positions, -1).argmax(dim=1) if pooling == "last" else mask.argmax(dim=1)
    return states[torch.arange(len(states), device=states.device), chosen]
