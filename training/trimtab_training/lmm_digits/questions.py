"""Questions about zero to three pages, each with exactly one correct answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from trimtab_training.lmm_digits.page_generator import EMPTY

Cells = Sequence[int]
MAX_PAGES: Final = 3


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
    wordings, answer = _BUILDERS[kind](pages, random)
    return Question(kind, wordings[int(random.integers(len(wordings)))], answer)


def _count(cells: Cells) -> int:
    return sum(cell != EMPTY for cell in cells)


def _digits(cells: Cells) -> list[int]:
    return [cell for cell in cells if cell != EMPTY]


_Wordings = tuple[tuple[str, ...], str]


def _ask_count(pages: Sequence[Cells], random: np.random.Generator) -> _Wordings:
    del random
    return ("How many digits are there?", "Count the digits."), str(_count(pages[0]))


def _ask_read(pages: Sequence[Cells], random: np.random.Generator) -> _Wordings:
    del random
    return ("Read the cells.", "What do the cells say?"), format_cells(pages[0])


def _ask_largest(pages: Sequence[Cells], random: np.random.Generator) -> _Wordings:
    del random
    return ("What is the largest digit?", "Name the largest digit."), str(max(_digits(pages[0])))


def _ask_smallest(pages: Sequence[Cells], random: np.random.Generator) -> _Wordings:
    del random
    return ("What is the smallest digit?", "Name the smallest digit."), str(min(_digits(pages[0])))


def _ask_present(pages: Sequence[Cells], random: np.random.Generator) -> _Wordings:
    """Half of the answers are yes."""
    present = sorted(set(_digits(pages[0])))
    absent = [digit for digit in range(10) if digit not in present]
    yes = random.random() < 0.5
    digit = present[int(random.integers(len(present)))] if yes else absent[int(random.integers(len(absent)))]
    return (f"Is there a {digit}?", f"Do you see a {digit}?"), "yes" if yes else "no"


def _ask_more(pages: Sequence[Cells], random: np.random.Generator) -> _Wordings:
    del random
    counts = [_count(cells) for cells in pages]
    return ("Which page has the most digits?", "Which page shows more digits?"), str(1 + counts.index(max(counts)))


def _ask_read_page(pages: Sequence[Cells], random: np.random.Generator) -> _Wordings:
    page = int(random.integers(len(pages)))
    return (f"Read page {page + 1}.", f"What does page {page + 1} say?"), format_cells(pages[page])


def _ask_sum(pages: Sequence[Cells], random: np.random.Generator) -> _Wordings:
    del pages
    first, second = random.integers(10, size=2).tolist()
    return (f"What is {first}+{second}?", f"{first}+{second}="), str(first + second)


_BUILDERS: Final[dict[Kind, Callable[[Sequence[Cells], np.random.Generator], _Wordings]]] = {
    Kind.COUNT: _ask_count,
    Kind.READ: _ask_read,
    Kind.LARGEST: _ask_largest,
    Kind.SMALLEST: _ask_smallest,
    Kind.PRESENT: _ask_present,
    Kind.MORE: _ask_more,
    Kind.READ_PAGE: _ask_read_page,
    Kind.SUM: _ask_sum,
}
