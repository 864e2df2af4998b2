"""Prompt lengths in tokens, predicted from the usage of completed chats.

Replicas tokenize; the router knows the bytes of a chat's text and its images. It learns tokens per byte of text, and
how many tokens an image adds to the prompt, by operating point: all of its embeddings in a decoder-only model, almost
none in a model with cross-attention. Before the first response there is no prediction.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from trimtab_pipelines.stages import EMBEDDINGS_INPUT, IMAGES_INPUT, MESSAGES_INPUT
from trimtab_protocol.chat.embedding_refs import parse_refs
from trimtab_protocol.chat.internal_wire import Usage
from trimtab_protocol.errors import ProtocolError
from trimtab_protocol.tensors import Array
from trimtab_router.scheduling.service_time import Key
from trimtab_router.scheduling.winsorizer import Winsorizer

WEIGHT = 0.05  # of the newest response; the effect grows with its length: long prompts are predicted best
_MESSAGE, _MESSAGE_BYTES = b'"role":', len(b'{"role":"user","content":[{"type":"text","text":""}]},')
_IMAGE, _IMAGE_BYTES = b'"image"}', len(b'{"type":"image"},')
"""Marks of a message and of an image in JSON, and the bytes of each that are not text."""


@dataclass(slots=True)
class _Rate:
    """Moving ratio of two quantities. Neither rare sizes nor rare ratios move it far."""

    total: float = 0.0
    units: float = 0.0
    _sizes: Winsorizer = field(default_factory=Winsorizer)
    _ratios: Winsorizer = field(default_factory=Winsorizer)
    _inverses: Winsorizer = field(default_factory=Winsorizer)

    def learn(self, total: float, units: float) -> None:
        if units > 0:
            ratio = self._ratios.clip(total / units)
            ratio = 1.0 / self._inverses.clip(1.0 / ratio if ratio else inf)
            units = self._sizes.clip(units)
            self.total += WEIGHT * (ratio * units - self.total)
            self.units += WEIGHT * (units - self.units)

    @property
    def is_known(self) -> bool:
        return self.units > 0

    @property
    def value(self) -> float:
        return self.total / self.units if self.units else 0.0


@dataclass(frozen=True, slots=True)
class PromptFeatures:
    """What the router knows of the prompt of a row."""

    text_bytes: int
    """Of the text of its messages, without JSON."""
    images: int = 0
    image_tokens: int | None = None
    """Embeddings that the encoder returned; None if unknown."""

    @classmethod
    def from_inputs(cls, inputs: Mapping[str, Array], row: int, images: int) -> "PromptFeatures | None":
        """Read the features of a row whose chat has this many images; None without messages."""
        shows = IMAGES_INPUT in inputs or EMBEDDINGS_INPUT in inputs
        features = (
            None
            if MESSAGES_INPUT not in inputs
            else cls.from_messages(inputs[MESSAGES_INPUT], row, images if shows else 0)
        )
        return (
            features
            if features is None or not shows
            else replace(features, image_tokens=_embedding_tokens(inputs, row))
        )

    @classmethod
    def from_messages(cls, messages: Array, row: int, images: int) -> "PromptFeatures | None":
        """Read them from the messages alone, before images are encoded; None if these are not text."""
        if messages.dtype.kind != "O":
            return None
        text = bytes(messages[row])
        frames = text.count(_MESSAGE) * _MESSAGE_BYTES + text.count(_IMAGE) * _IMAGE_BYTES
        return cls(max(len(text) - frames, 1), images)


class PromptLengths:
    """Predicted prompt lengths of one stage."""

    def __init__(self) -> None:
        self.point: Key = ("", "")  # the planned one, for which lengths are predicted
        self._tokens_per_byte = _Rate()
        self._tokens_per_image: dict[Key, _Rate] = {}
        self._tokens_per_embedding = _Rate()

    def tokens(self, features: PromptFeatures | None) -> float:
        """Return the predicted tokens of a prompt; 0 if unknown."""
        if features is None or not self._tokens_per_byte.is_known:
            return 0.0
        return self._tokens_per_byte.value * features.text_bytes + self._image_tokens(features)

    def learn(self, features: PromptFeatures | None, usage: Usage, point: Key = ("", "")) -> None:
        """Learn from the usage of a response at an operating point; one without usage is ignored."""
        if features is None or not usage.prompt:
            return
        if not features.images:
            self._tokens_per_byte.learn(usage.prompt, features.text_bytes)
            return
        text = usage.text or min(self._tokens_per_byte.value * features.text_bytes, usage.prompt)
        image_tokens = max(usage.prompt - text, 0.0)
        if usage.text:
            self._tokens_per_byte.learn(usage.text, features.text_bytes)
        self._tokens_per_image.setdefault(point, _Rate()).learn(image_tokens, features.images)
        self._tokens_per_embedding.learn(image_tokens, usage.image)

    def _image_tokens(self, features: PromptFeatures) -> float:
        if features.image_tokens is not None and self._tokens_per_embedding.is_known:
            return self._tokens_per_embedding.value * features.image_tokens
        rates = self._tokens_per_image
        rate = rates.get(self.point) or next(iter(rates.values()), None)
        return rate.value * features.images if rate else 0.0


def _embedding_tokens(inputs: Mapping[str, Array], row: int) -> int | None:
    """Return the embeddings of a row's images; None if a reference does not state them."""
    references = inputs.get(EMBEDDINGS_INPUT)
    if references is None or IMAGES_INPUT in inputs:
        return None
    try:
        return sum(reference.rows for reference in parse_refs(bytes(references[row])))
    except ProtocolError:
        return None


def mean_prompt_tokens(
    prompt_sources: Mapping[str, tuple[str, PromptLengths]], inputs: Mapping[str, Array], images: int
) -> dict[str, float]:
    """Mean predicted prompt tokens of a row by generation stage; `prompt_sources`: messages input and lengths."""
    tokens_by_stage = {}
    for name, (tensor, prompt_lengths) in prompt_sources.items():
        messages = inputs.get(tensor)
        if messages is not None and len(messages):
            rows = [PromptFeatures.from_messages(messages, row, images) for row in range(len(messages))]
            tokens_by_stage[name] = sum(map(prompt_lengths.tokens, rows)) / len(rows)
    return {name: tokens for name, tokens in tokens_by_stage.items() if tokens}
