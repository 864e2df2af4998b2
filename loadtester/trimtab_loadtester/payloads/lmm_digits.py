"""Chats of the lmm-digits pipeline: questions about handwritten pages whose only right answer is known.

The annotation reads `lmm-digits`, or `lmm-digits: pages=0..3` for how many pages a question is about.
"""

import json
from collections.abc import Sequence
from typing import Final

import numpy as np

from trimtab_loadtester.multimodal.traffic import Request
from trimtab_loadtester.payloads.interface import Outputs, Payload, Score
from trimtab_protocol import Tensor

_EXAMPLE: Final = "pages=0..3"
BESIDE: Final = 1_000_000
"""From here on are the chats whose pages stand beside those that another one asks about."""


class ChatPayloads:
    """Chats about pages that training has never drawn: `messages` [1], and `images` [1, pages] where there are some."""

    def __init__(self, seed: int = 0, written: str = "") -> None:
        from trimtab_training.lmm_digits.chat_samples import ChatSource  # noqa: PLC0415 - slow to import
        from trimtab_training.lmm_digits.questions import MAX_PAGES  # noqa: PLC0415 - as above

        self._chats = ChatSource(seed, parse_pages(written) or (0, MAX_PAGES))

    def payload(self, index: int) -> Payload:
        """Draw a chat."""
        chat = self._chats.chat(index)
        return _payload(chat.messages, chat.images, chat.answer)

    def chat_with_images(self, index: int, images: int) -> Payload:
        """Draw a chat of so many images, which no other shows; of more than three pages the first are asked about."""
        from trimtab_training.lmm_digits.questions import MAX_PAGES  # noqa: PLC0415 - slow to import

        chat = self._chats.chat(index, min(images, MAX_PAGES))
        shown = list(chat.images)
        for more in range(images):
            if len(shown) >= images:
                break
            shown += self._chats.chat((1 + more) * BESIDE + index, MAX_PAGES).images
        text = json.loads(chat.messages)[0]["content"][-1]
        content = [*({"type": "image"} for _ in range(images)), text]
        messages = json.dumps([{"role": "user", "content": content}]).encode()
        return _payload(messages, tuple(shown[:images]), chat.answer)

    def score(self, truth: object, outputs: Outputs) -> Score:
        """Whether the answer is right to the letter; KeyError where there is none."""
        return Score(correct=int(outputs["text"].reshape(-1)[0] == str(truth).encode()), total=1)


class DrawnChats(ChatPayloads):
    """Chats of as many images as requests of multimodal load show, in their order."""

    def __init__(self, requests: Sequence[Request], seed: int = 0) -> None:
        super().__init__(seed)
        self._images = [request.images for request in requests]

    def payload(self, index: int) -> Payload:
        """The chat of request ``index``."""
        return self.chat_with_images(index, self._images[index])


def _payload(messages: bytes, images: tuple[bytes, ...], answer: str) -> Payload:
    tensors = [Tensor("messages", "BYTES", _bytes((messages,)))]
    if images:
        tensors.append(Tensor("images", "BYTES", _bytes(images)[None]))
    return Payload(tuple(tensors), truth=answer)


def parse_pages(written: str) -> tuple[int, int] | None:
    """Read `pages=0..3`; None where nothing is written.

    Raises:
        ValueError: it says something else.
    """
    name, equals, value = (piece.strip() for piece in written.partition("="))
    if not name:
        return None
    least, dots, most = value.partition("..")
    if name != "pages" or not equals or not least.isdecimal() or not (most if dots else least).isdecimal():
        raise ValueError(f"payloads lmm-digits: {written.strip()!r} is not understood; write for instance {_EXAMPLE}")
    return int(least), int(most if dots else least)


def _bytes(elements: tuple[bytes, ...]) -> "np.ndarray[tuple[int], np.dtype[np.object_]]":
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array
