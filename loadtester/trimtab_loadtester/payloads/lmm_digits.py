"""Chats of the lmm-digits pipeline: questions about handwritten pages, each with one correct answer.

The annotation is `lmm-digits`, or `lmm-digits: pages=0..3` for the number of pages of a question.
"""

import json
from collections.abc import Sequence
from functools import partial
from typing import Final

from trimtab_loadtester.multimodal.traffic import Request
from trimtab_loadtester.payloads.interface import Outputs, Payload, Score, parse_options, parse_range
from trimtab_protocol import Tensor
from trimtab_protocol.chat.internal_wire import bytes_tensor

_READERS: Final = {"pages": partial(parse_range, int)}
EXTRA_PAGES_OFFSET: Final = 1_000_000
"""First index of the chats whose pages are added to those of another chat."""


class ChatPayloads:
    """Chats about held-out pages: `messages` [1], and `images` [1, pages] if there are pages."""

    def __init__(self, seed: int = 0, options: str = "") -> None:
        from trimtab_training.lmm_digits.questions import MAX_PAGES, ChatSource  # noqa: PLC0415 - slow to import

        self._chats = ChatSource(seed, parse_pages(options) or (0, MAX_PAGES))

    def payload(self, index: int) -> Payload:
        chat = self._chats.chat(index)
        return _payload(chat.messages, chat.images, chat.answer)

    def chat_with_images(self, index: int, images: int) -> Payload:
        """Draw a chat with `images` distinct images; its question is about the first `MAX_PAGES` of them."""
        from trimtab_training.lmm_digits.questions import MAX_PAGES  # noqa: PLC0415 - slow to import

        chat = self._chats.chat(index, min(images, MAX_PAGES))
        shown = list(chat.images)
        for extra in range(images):
            if len(shown) >= images:
                break
            shown += self._chats.chat((1 + extra) * EXTRA_PAGES_OFFSET + index, MAX_PAGES).images
        text = json.loads(chat.messages)[0]["content"][-1]
        content = [*({"type": "image"} for _ in range(images)), text]
        messages = json.dumps([{"role": "user", "content": content}]).encode()
        return _payload(messages, tuple(shown[:images]), chat.answer)

    def score(self, truth: object, outputs: Outputs) -> Score:
        """Compare the text with the truth; raises KeyError if there is no `text`."""
        return Score(correct=int(outputs["text"].reshape(-1)[0] == str(truth).encode()), total=1)


class DrawnChats(ChatPayloads):
    """Chats with the image counts of the requests of a multimodal load, in order."""

    def __init__(self, requests: Sequence[Request], seed: int = 0) -> None:
        super().__init__(seed)
        self._images = [request.images for request in requests]

    def payload(self, index: int) -> Payload:
        return self.chat_with_images(index, self._images[index])


def _payload(messages: bytes, images: tuple[bytes, ...], answer: str) -> Payload:
    tensors = [Tensor("messages", "BYTES", bytes_tensor([messages]))]
    if images:
        tensors.append(Tensor("images", "BYTES", bytes_tensor(images)[None]))
    return Payload(tuple(tensors), truth=answer)


def parse_pages(text: str) -> tuple[int, int] | None:
    """Parse `pages=0..3`; None for an empty text, ValueError for another form."""
    pages: tuple[int, int] | None = parse_options("lmm-digits", text, _READERS, "pages=0..3").get("pages")
    return pages
