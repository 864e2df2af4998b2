"""Chats about pages: messages and image files as a client sends them, with the expected answer."""

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
MAX_TRIES: Final = 64


@dataclass(frozen=True, slots=True)
class Chat:
    """A question as a chat."""

    kind: Kind
    messages: bytes
    """JSON."""
    images: tuple[bytes, ...]
    """PNG files, in order."""
    answer: str
    """The exact expected answer."""


class ChatSource:
    """Generator of chats about held-out pages, deterministic in seed and index."""

    def __init__(self, seed: int = CHAT_SEED, pages: tuple[int, int] = (0, MAX_PAGES)) -> None:
        least, most = pages
        if not 0 <= least <= most <= MAX_PAGES:
            raise ValueError(f"pages {least}..{most}: expected a range within 0..{MAX_PAGES}")
        self._pages = CellPageSource("held-out", seed)
        self._seed = seed
        self._least, self._most = pages

    def chat(self, index: int, page_count: int | None = None) -> Chat:
        """Draw chat `index`, uniform over numbers of pages and then over kinds; `page_count` fixes the former."""
        random = np.random.default_rng([self._seed, index])
        drawn_count = int(random.integers(self._least, self._most + 1))
        count = drawn_count if page_count is None else page_count
        kinds = [kind for kind, (least, most) in PAGES.items() if least <= count <= most]
        kind = kinds[int(random.integers(len(kinds)))]
        for attempt in range(MAX_TRIES):
            first = (index * MAX_TRIES + attempt) * MAX_PAGES
            pages = [self._pages.page(first + number) for number in range(count)]
            if fits(kind, [page.cells for page in pages]):
                return _chat(kind, pages, random)
        raise RuntimeError(f"no pages fit a question of kind {kind.value!r} in {MAX_TRIES} tries")


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode a grey page [1, height, width]."""
    file = io.BytesIO()
    Pillow.fromarray(pixels[0]).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _chat(kind: Kind, pages: list[CellPage], random: np.random.Generator) -> Chat:
    question = ask(kind, [page.cells for page in pages], random)
    content = [*({"type": "image"} for _ in pages), {"type": "text", "text": question.text}]
    messages = json.dumps([{"role": "user", "content": content}]).encode()
    return Chat(kind, messages, tuple(png(page.pixels) for page in pages), question.answer)
