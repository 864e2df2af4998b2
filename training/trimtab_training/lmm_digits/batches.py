"""Training batches: questions spelled as ids, about real pages (their features) or about spelled twins of pages.

A twin puts the embedding of a cell's own character where a page's tokens would stand. Questions about twins are free
and endless, and a tower aligned to the same characters makes real pages read like them.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from trimtab_model_servers.families.lmm_digits import CELLS, CELLS_A_SIDE
from trimtab_model_servers.families.lmm_digits.models import END_ID, PAD_ID
from trimtab_model_servers.families.lmm_digits.tokenizer import END, prompt, special_id
from trimtab_model_servers.families.lmm_digits.vision_tower import PAGE_TOKENS, TOKENS_A_SIDE
from trimtab_training.lmm_digits.page_generator import EMPTY
from trimtab_training.lmm_digits.questions import PAGES, Kind, Question, ask, fits

IGNORED: Final = -100
KINDS_OF_PAGES: Final[dict[int, tuple[Kind, ...]]] = {
    0: (Kind.SUM,),
    1: (Kind.COUNT, Kind.READ, Kind.LARGEST, Kind.SMALLEST, Kind.PRESENT, Kind.PRESENT, Kind.PRESENT),
    2: (Kind.MORE, Kind.READ_PAGE),
    3: (Kind.MORE, Kind.READ_PAGE),
}
"""What is asked of so many pages, as often as it stands here: whether a digit is there is what they learn last."""

SHARES: Final = (0.1, 0.58, 0.16, 0.16)
"""How often a batch asks about 0, 1, 2 and 3 pages."""

CELL_OF_TOKEN: Final = tuple(
    (row * CELLS_A_SIDE // TOKENS_A_SIDE) * CELLS_A_SIDE + column * CELLS_A_SIDE // TOKENS_A_SIDE
    for row in range(TOKENS_A_SIDE)
    for column in range(TOKENS_A_SIDE)
)
"""Which cell each of a page's tokens lies in."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step's questions, all about the same number of pages.

    Attributes:
        ids: int64 [B, L], padded behind.
        labels: int64 [B, L], what should come next at each place, ``IGNORED`` elsewhere.
        cells: int64 [B, pages, 4], what the pages hold.
        drawn: int64 [B, pages], which page of the pool each is; -1 where it is a twin.
        hints: int64 [B, L], what else they are taught to say on the way: where a register stands, its cell's character;
            where a digit is asked for, the register of the first cell that shows it, or that none does; where a page
            is, what stands first on it.
    """

    ids: Tensor
    labels: Tensor
    cells: Tensor
    drawn: Tensor
    hints: Tensor


class Questioner:
    """Draws batches of questions about a pool of pages."""

    def __init__(self, tokenizer: Tokenizer, cells: NDArray[np.int64], *, page_tokens: int, seed: int) -> None:
        self._tokenizer = tokenizer
        self._cells = cells
        self._page_tokens = page_tokens
        self._random = np.random.default_rng(seed)
        self._characters = character_ids(tokenizer)
        self._spelled: dict[tuple[str, int], list[int]] = {}
        self._nowhere = special_id(tokenizer, END)
        self._register_ids = [special_id(tokenizer, f"<|cell-{cell + 1}|>") for cell in range(CELLS)]

    def batch(self, size: int, twins: float) -> Batch:
        """Draw ``size`` questions; a share of them, ``twins``, is about spelled twins."""
        pages = int(self._random.choice(len(SHARES), p=SHARES))
        rows = [self._row(pages, twins) for _ in range(size)]
        longest = max(len(ids) for ids, *_ in rows)
        ids = torch.full((size, longest), PAD_ID)
        labels, hints = torch.full((size, longest), IGNORED), torch.full((size, longest), IGNORED)
        for index, (row, asked, cells, _) in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row)
            answer = len(self._tokenizer.encode(asked.answer, add_special_tokens=False).ids) + 1
            labels[index, len(row) - 1 - answer : len(row) - 1] = torch.tensor(row[-answer:])
            at = [place for place, token in enumerate(row) if token in self._register_ids]
            hints[index, at] = self._characters[torch.from_numpy(cells.reshape(-1))]
            if asked.kind in {Kind.PRESENT, Kind.READ_PAGE}:
                self._hint_where(asked.kind, hints[index], row[: len(row) - answer], cells)
        return Batch(
            ids,
            labels,
            torch.from_numpy(np.stack([cells for *_, cells, _ in rows])),
            torch.from_numpy(np.stack([drawn for *_, drawn in rows])),
            hints,
        )

    def _hint_where(self, kind: Kind, hints: Tensor, asked: list[int], cells: NDArray[np.int64]) -> None:
        """Teach the digit in a question to find itself on the page, or its page: answers alone teach that very late."""
        characters = self._characters.tolist()
        place = max(place for place, token in enumerate(asked) if token in characters[:EMPTY])
        digit = characters.index(asked[place])
        if kind is Kind.READ_PAGE:
            hints[place] = characters[cells[digit - 1, 0]]
            return
        found = np.flatnonzero(cells[0] == digit)
        hints[place] = self._register_ids[int(found[0])] if len(found) else self._nowhere

    def _row(self, pages: int, twins: float) -> tuple[list[int], Question, NDArray[np.int64], NDArray[np.int64]]:
        kinds = KINDS_OF_PAGES[pages]
        kind = kinds[int(self._random.integers(len(kinds)))]
        while True:
            if self._random.random() < twins:
                drawn = np.full(pages, -1)
                cells = self._random.integers(EMPTY, size=(pages, CELLS))
                for row in cells:
                    row[self._random.permutation(CELLS)[: int(self._random.integers(CELLS))]] = EMPTY
            else:
                drawn = self._random.integers(len(self._cells), size=pages)
                cells = self._cells[drawn]
            if fits(kind, cells.tolist()):
                break
        asked = ask(kind, cells.tolist(), self._random)
        key = (asked.text, pages)
        if key not in self._spelled:
            self._spelled[key] = prompt(self._tokenizer, asked.text, pages, page_tokens=self._page_tokens)
        answer = self._tokenizer.encode(asked.answer, add_special_tokens=False).ids
        return [*self._spelled[key], *answer, END_ID], asked, cells, drawn


def character_ids(tokenizer: Tokenizer) -> Tensor:
    """The token of each thing a cell can hold, int64 [11]."""
    return torch.tensor([tokenizer.token_to_id(character) for character in "0123456789-"])


def token_cells(cells: Tensor) -> Tensor:
    """What lies under each of a page's tokens: [..., 4] cells to [..., 16]."""
    return cells[..., list(CELL_OF_TOKEN)]


assert len(CELL_OF_TOKEN) == PAGE_TOKENS  # noqa: S101
assert max(pages for _, pages in PAGES.values()) == len(SHARES) - 1  # noqa: S101
