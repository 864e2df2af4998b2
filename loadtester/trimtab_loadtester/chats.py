"""Chats of the lmm-digits pipeline: questions about handwritten pages whose only right answer is known.

The annotation reads `lmm-digits`, or `lmm-digits: pages=0..3` for how many pages a question is about.
"""

from typing import Final

import numpy as np

from trimtab_loadtester.payload import Outputs, Payload, Score
from trimtab_protocol import Tensor

_EXAMPLE: Final = "pages=0..3"


class ChatPayloads:
    """Chats about pages that training has never drawn: `messages` [1], and `images` [1, pages] where there are some."""

    def __init__(self, seed: int = 0, written: str = "") -> None:
        from trimtab_model_servers.lmm_digits.chats import ChatSource  # noqa: PLC0415 - slow to import
        from trimtab_model_servers.lmm_digits.questions import MAX_PAGES  # noqa: PLC0415 - as above

        self._chats = ChatSource(seed, pages_of(written) or (0, MAX_PAGES))

    def payload(self, index: int) -> Payload:
        """Draw a chat."""
        chat = self._chats.chat(index)
        tensors = [Tensor("messages", "BYTES", _bytes((chat.messages,)))]
        if chat.images:
            tensors.append(Tensor("images", "BYTES", _bytes(chat.images)[None]))
        return Payload(tuple(tensors), truth=chat.answer)

    def score(self, truth: object, outputs: Outputs) -> Score:
        """Whether the answer is right to the letter; KeyError where there is none."""
        return Score(correct=int(outputs["text"].reshape(-1)[0] == str(truth).encode()), total=1)


def pages_of(written: str) -> tuple[int, int] | None:
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
