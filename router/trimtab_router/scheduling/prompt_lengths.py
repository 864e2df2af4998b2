"""How many tokens prompts have that nobody has read yet, by what those took that were answered. Pure.

Replicas spell and count; a router knows how long the text of a chat is and what it shows. So it learns how many tokens
a byte of text comes to, and how many of an image's join the prompt: all of them in a decoder-only model, next to none
in one that attends across. Before the first answer nothing is known, and nothing is said.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trimtab_pipelines.stages import EMBEDDINGS_INPUT, IMAGES_INPUT, MESSAGES_INPUT
from trimtab_protocol.chat.embedding_refs import parse_refs
from trimtab_protocol.chat.internal_wire import Usage
from trimtab_protocol.errors import ProtocolError
from trimtab_protocol.tensors import Array

WEIGHT = 0.05
"""Of the newest answer. What it counts for grows with its length, so that long prompts are told best."""
_MESSAGE, _MESSAGE_BYTES = b'"role":', len(b'{"role":"user","content":[{"type":"text","text":""}]},')
_IMAGE, _IMAGE_BYTES = b'"image"}', len(b'{"type":"image"},')
"""What tells a message and an image apart in JSON, and the bytes of each that are no text of a chat's."""


@dataclass(slots=True)
class _Rate:
    """So much of one thing for each of another, as lately."""

    of: float = 0.0
    each: float = 0.0

    def learn(self, of: float, each: float) -> None:
        if each > 0:
            self.of += WEIGHT * (of - self.of)
            self.each += WEIGHT * (each - self.each)

    @property
    def known(self) -> bool:
        return self.each > 0

    @property
    def value(self) -> float:
        return self.of / self.each if self.each else 0.0


@dataclass(frozen=True, slots=True)
class PromptFeatures:
    """What a router knows of the prompt of a row."""

    text_bytes: int
    """Of its messages, without the JSON around their text."""
    images: int = 0
    """How many its chat shows."""
    image_tokens: int | None = None
    """That their encoder made of them; None where that is not known."""

    @classmethod
    def of(cls, inputs: Mapping[str, Array], row: int, images: int) -> "PromptFeatures | None":
        """Read it off a row's inputs, of a chat that shows so many images; None where they tell of no messages."""
        shows = IMAGES_INPUT in inputs or EMBEDDINGS_INPUT in inputs
        found = (
            None
            if MESSAGES_INPUT not in inputs
            else cls.of_messages(inputs[MESSAGES_INPUT], row, images if shows else 0)
        )
        return found if found is None or not shows else replace(found, image_tokens=_referred_tokens(inputs, row))

    @classmethod
    def of_messages(cls, messages: Array, row: int, images: int) -> "PromptFeatures | None":
        """Of a row's messages alone, before its images are encoded; None where these are no text."""
        if messages.dtype.kind != "O":
            return None
        told = bytes(messages[row])
        frames = told.count(_MESSAGE) * _MESSAGE_BYTES + told.count(_IMAGE) * _IMAGE_BYTES
        return cls(max(len(told) - frames, 1), images)


class PromptLengths:
    """What is known of the prompts of one stage."""

    def __init__(self) -> None:
        self._of_text = _Rate()
        self._of_images = _Rate()
        self._joining = _Rate()

    def tokens(self, shown: PromptFeatures | None) -> float:
        """How many tokens a prompt has; 0 where nothing is known."""
        if shown is None or not self._of_text.known:
            return 0.0
        return self._of_text.value * shown.text_bytes + self._image_tokens(shown)

    def learn(self, shown: PromptFeatures | None, usage: Usage) -> None:
        """An answer tells what its prompt took; one that does not say is passed over."""
        if shown is None or not usage.prompt:
            return
        if not shown.images:
            self._of_text.learn(usage.prompt, shown.text_bytes)
            return
        text = usage.text or min(self._of_text.value * shown.text_bytes, usage.prompt)
        joined = max(usage.prompt - text, 0.0)
        if usage.text:
            self._of_text.learn(usage.text, shown.text_bytes)
        self._of_images.learn(joined, shown.images)
        self._joining.learn(joined, usage.image)

    def _image_tokens(self, shown: PromptFeatures) -> float:
        if shown.image_tokens is not None and self._joining.known:
            return self._joining.value * shown.image_tokens
        return self._of_images.value * shown.images


def _referred_tokens(inputs: Mapping[str, Array], row: int) -> int | None:
    """What was made of a row's images, where each reference says so."""
    told = inputs.get(EMBEDDINGS_INPUT)
    if told is None or IMAGES_INPUT in inputs:
        return None
    try:
        return sum(one.rows for one in parse_refs(bytes(told[row])))
    except ProtocolError:
        return None
