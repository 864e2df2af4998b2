"""Questions about zero to three pages, each with exactly one correct answer, and chats that ask them."""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from trimtab_training.lmm_digits.page_generator import EMPTY, CellPage, CellPageSource

Cells = Sequence[int]
MAX_PAGES: Final = 3
CHAT_SEED: Final = 31
EVALUATION_CHATS, EVALUATION_SEED = 4_000, 22
MAX_TRIES: Final = 64


class Kind(StrEnum):
    """Kind of a question."""

    COUNT = "count"
    READ = "read"
    LARGEST = "largest"
    SMALLEST = "smallest"
    PRESENT = "present"
    MORE = "more"
    READ_PAGE = "readPage"
    SUM = "sum"


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its exact answer."""

    kind: Kind
    text: str
    answer: str


PAGES: Final[dict[Kind, tuple[int, int]]] = {
    Kind.COUNT: (1, 1),
    Kind.READ: (1, 1),
    Kind.LARGEST: (1, 1),
    Kind.SMALLEST: (1, 1),
    Kind.PRESENT: (1, 1),
    Kind.MORE: (2, MAX_PAGES),
    Kind.READ_PAGE: (2, MAX_PAGES),
    Kind.SUM: (0, 0),
}
"""Least and largest number of pages of each kind."""


def format_cells(cells: Cells) -> str:
    """Format cells row by row, with a dash for an empty one: `7-43`."""
    return "".join("-" if cell == EMPTY else str(cell) for cell in cells)


def fits(kind: Kind, pages: Sequence[Cells]) -> bool:
    """Whether a question of this kind about these pages has exactly one answer."""
    least, most = PAGES[kind]
    if not least <= len(pages) <= most:
        return False
    counts = sorted((_count(cells) for cells in pages), reverse=True)
    return kind is not Kind.MORE or counts[0] > counts[1]


def ask(kind: Kind, pages: Sequence[Cells], random: np.random.Generator) -> Question:
    """Draw a wording of a question; ValueError if it has not exactly one answer."""
    if not fits(kind, pages):
        raise ValueError(
            f"{kind.value!r} has not exactly one answer on pages {[format_cells(cells) for cells in pages]}"
        )
    wordings, answer = _build(kind, pages, random)
    return Question(kind, wordings[int(random.integers(len(wordings)))], answer)


def _count(cells: Cells) -> int:
    return sum(cell != EMPTY for cell in cells)


def _digits(cells: Cells) -> list[int]:
    return [cell for cell in cells if cell != EMPTY]


def _build(kind: Kind, pages: Sequence[Cells], random: np.random.Generator) -> tuple[tuple[str, ...], str]:
    """Return the wordings of a question and its answer; half of the answers of PRESENT are yes."""
    wordings: tuple[str, ...]
    match kind:
        case Kind.COUNT:
            wordings, answer = ("How many digits are there?", "Count the digits."), str(_count(pages[0]))
        case Kind.READ:
            wordings, answer = ("Read the cells.", "What do the cells say?"), format_cells(pages[0])
        case Kind.LARGEST:
            wordings, answer = ("What is the largest digit?", "Name the largest digit."), str(max(_digits(pages[0])))
        case Kind.SMALLEST:
            wordings, answer = ("What is the smallest digit?", "Name the smallest digit."), str(min(_digits(pages[0])))
        case Kind.PRESENT:
            present = sorted(set(_digits(pages[0])))
            yes = random.random() < 0.5
            digits = present if yes else [digit for digit in range(10) if digit not in present]
            digit = digits[int(random.integers(len(digits)))]
            wordings, answer = (f"Is there a {digit}?", f"Do you see a {digit}?"), "yes" if yes else "no"
        case Kind.MORE:
            counts = [_count(cells) for cells in pages]
            most = 1 + counts.index(max(counts))
            wordings, answer = ("Which page has the most digits?", "Which page shows more digits?"), str(most)
        case Kind.READ_PAGE:
            page = int(random.integers(len(pages)))
            wordings, answer = (f"Read page {page + 1}.", f"What does page {page + 1} say?"), format_cells(pages[page])
        case Kind.SUM:
            first, second = random.integers(10, size=2).tolist()
            sums = (f"{first}+{second}", f"{first} + {second}", f"{first} plus {second}")
            wordings, answer = (f"{sums[0]}=", *(f"What is {each}?" for each in sums)), str(first + second)
    return wordings, answer


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

    def chat(self, index: int, page_count: int | None = None, kind: Kind | None = None) -> Chat:
        """Draw chat `index`, uniform over numbers of pages and then over kinds; `page_count` or `kind` fixes one."""
        random = np.random.default_rng([self._seed, index])
        range_of_pages = (self._least, self._most) if kind is None else PAGES[kind]
        drawn_count = int(random.integers(range_of_pages[0], range_of_pages[1] + 1))
        count = drawn_count if page_count is None else page_count
        if kind is None:
            kinds = [kind for kind, (least, most) in PAGES.items() if least <= count <= most]
            kind = kinds[int(random.integers(len(kinds)))]
        for attempt in range(MAX_TRIES):
            first = (index * MAX_TRIES + attempt) * MAX_PAGES
            pages = [self._pages.page(first + number) for number in range(count)]
            if fits(kind, [page.cells for page in pages]):
                return _chat(kind, pages, random)
        raise RuntimeError(f"no pages fit a question of kind {kind.value!r} in {MAX_TRIES} tries")


class EvaluationChats:
    """As many held-out chats of each kind, as samples of `trimtab evaluate`; a sample's task is its kind."""

    def __init__(self) -> None:
        self._chats = ChatSource(EVALUATION_SEED)

    def __len__(self) -> int:
        return EVALUATION_CHATS

    def __getitem__(self, index: int) -> tuple[dict[str, object], dict[str, str]]:
        chat = self._chats.chat(index, kind=list(Kind)[index % len(Kind)])
        images = {"images": list(chat.images)} if chat.images else {}
        return {"messages": chat.messages, **images}, {"text": chat.answer}

    def task(self, index: int) -> str:
        return list(Kind)[index % len(Kind)].value.replace("P", "-p")


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
