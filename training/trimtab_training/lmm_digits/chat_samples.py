"""Questions about pages as chats: messages and image files, as a caller sends them, beside their only right answer."""

import io
import json
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from trimtab_training.lmm_digits.page_generator import CellPage, CellPageSource
from trimtab_training.lmm_digits.questions import MAX_PAGES, PAGES, Kind, ask, fits

CHAT_SEED: Final = 31
MOST_TRIES: Final = 64


@dataclass(frozen=True, slots=True)
class Chat:
    """One question.

    Attributes:
        kind: what is asked.
        messages: JSON, as `docs/develop/chat-stages.md` has it.
        images: PNG files, in order.
        answer: what a right answer says, to the letter.
    """

    kind: Kind
    messages: bytes
    images: tuple[bytes, ...]
    answer: str


class ChatSource:
    """An endless supply of chats about held-out pages, the same for the same seed and index."""

    def __init__(self, seed: int = CHAT_SEED, pages: tuple[int, int] = (0, MAX_PAGES)) -> None:
        least, most = pages
        if not 0 <= least <= most <= MAX_PAGES:
            raise ValueError(f"pages {least}..{most} must lie between 0 and {MAX_PAGES}, the lesser first")
        self._pages = CellPageSource("held-out", seed)
        self._seed = seed
        self._least, self._most = pages

    def chat(self, index: int, pages_shown: int | None = None) -> Chat:
        """Draw chat ``index``: each number of pages as often as any other, and of those each kind of question.

        ``pages_shown`` says how many pages it is about instead.
        """
        random = np.random.default_rng([self._seed, index])
        drawn = int(random.integers(self._least, self._most + 1))
        count = drawn if pages_shown is None else pages_shown
        kinds = [kind for kind, (least, most) in PAGES.items() if least <= count <= most]
        kind = kinds[int(random.integers(len(kinds)))]
        for attempt in range(MOST_TRIES):
            first = (index * MOST_TRIES + attempt) * MAX_PAGES
            pages = [self._pages.page(first + number) for number in range(count)]
            if fits(kind, [page.cells for page in pages]):
                return _chat(kind, pages, random)
        raise RuntimeError(f"no pages that {kind.value!r} can be asked of in {MOST_TRIES} tries")


def png(pixels: NDArray[np.uint8]) -> bytes:
    """A grey page [1, height, width] as a PNG file."""
    file = io.BytesIO()
    Pillow.fromarray(pixels[0]).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _chat(kind: Kind, pages: list[CellPage], random: np.random.Generator) -> Chat:
    question = ask(kind, [page.cells for page in pages], random)
    content = [*({"type": "image"} for _ in pages), {"type": "text", "text": question.text}]
    messages = json.dumps([{"role": "user", "content": content}]).encode()
    return Chat(kind, messages, tuple(png(page.pixels) for page in pages), question.answer)
