"""Training batches: tokenized questions about real pages (their features) or about twins.

A twin replaces a page's tokens by the embeddings of its cells' characters. Twins cost nothing to draw, and the tower is
aligned to the same characters.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from trimtab_model_servers.families.lmm_digits import CELLS, CELLS_A_SIDE
from trimtab_model_servers.families.lmm_digits.models import END_ID, PAD_ID, PAGE_TOKENS, TOKENS_A_SIDE
from trimtab_model_servers.families.lmm_digits.tokenizer import END, prompt, special_id
from trimtab_training.lmm_digits.page_generator import EMPTY
from trimtab_training.lmm_digits.questions import PAGES, Kind, Question, ask, fits

IGNORED: Final = -100
KINDS_OF_PAGES: Final[dict[int, tuple[Kind, ...]]] = {
    0: (Kind.SUM,),
    1: (Kind.COUNT, Kind.READ, Kind.LARGEST, Kind.SMALLEST, Kind.PRESENT, Kind.PRESENT, Kind.PRESENT),
    2: (Kind.MORE, Kind.READ_PAGE),
    3: (Kind.MORE, Kind.READ_PAGE),
}
"""Question kinds by number of pages, with repetition as weight; PRESENT is learned last."""

SHARES: Final = (0.1, 0.58, 0.16, 0.16)
"""Shares of batches about 0, 1, 2 and 3 pages."""

CELL_OF_TOKEN: Final = tuple(
    (row * CELLS_A_SIDE // TOKENS_A_SIDE) * CELLS_A_SIDE + column * CELLS_A_SIDE // TOKENS_A_SIDE
    for row in range(TOKENS_A_SIDE)
    for column in range(TOKENS_A_SIDE)
)
"""Cell of each page token."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Questions of one step, all about the same number of pages."""

    ids: Tensor
    """int64 [B, L], padded at the end."""
    labels: Tensor
    """int64 [B, L], the next token of the answer, else `IGNORED`."""
    cells: Tensor
    """int64 [B, pages, 4], content of the pages' cells."""
    pool_indices: Tensor
    """int64 [B, pages], index of each page in the pool; -1 for a twin."""
    hints: Tensor
    """int64 [B, L], auxiliary targets: at a register, its cell's character; at a digit in the question, the register of
    the first cell that shows it, or END; at a page number, the first character of that page."""


class Questioner:
    """Generator of question batches about a pool of pages."""

    def __init__(self, tokenizer: Tokenizer, cells: NDArray[np.int64], *, page_tokens: int, seed: int) -> None:
        self._tokenizer = tokenizer
        self._cells = cells
        self._page_tokens = page_tokens
        self._random = np.random.default_rng(seed)
        self._characters = character_ids(tokenizer)
        self._prompts: dict[tuple[str, int], list[int]] = {}
        self._absent_id = special_id(tokenizer, END)
        self._register_ids = [special_id(tokenizer, f"<|cell-{cell + 1}|>") for cell in range(CELLS)]

    def batch(self, size: int, twins: float) -> Batch:
        """Draw `size` questions; `twins` is the share about twins."""
        pages = int(self._random.choice(len(SHARES), p=SHARES))
        rows = [self._row(pages, twins) for _ in range(size)]
        longest = max(len(ids) for ids, *_ in rows)
        ids = torch.full((size, longest), PAD_ID)
        labels, hints = torch.full((size, longest), IGNORED), torch.full((size, longest), IGNORED)
        for index, (row, question, cells, _) in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row)
            answer = len(self._tokenizer.encode(question.answer, add_special_tokens=False).ids) + 1
            labels[index, len(row) - 1 - answer : len(row) - 1] = torch.tensor(row[-answer:])
            registers = [position for position, token in enumerate(row) if token in self._register_ids]
            hints[index, registers] = self._characters[torch.from_numpy(cells.reshape(-1))]
            if question.kind in {Kind.PRESENT, Kind.READ_PAGE}:
                self._hint_position(question.kind, hints[index], row[: len(row) - answer], cells)
        return Batch(
            ids,
            labels,
            torch.from_numpy(np.stack([cells for *_, cells, _ in rows])),
            torch.from_numpy(np.stack([indices for *_, indices in rows])),
            hints,
        )

    def _hint_position(self, kind: Kind, hints: Tensor, prompt_ids: list[int], cells: NDArray[np.int64]) -> None:
        """Add the hint at the last digit of a question: its cell on the page, or the content of the named page."""
        characters = self._characters.tolist()
        position = max(index for index, token in enumerate(prompt_ids) if token in characters[:EMPTY])
        digit = characters.index(prompt_ids[position])
        if kind is Kind.READ_PAGE:
            hints[position] = characters[cells[digit - 1, 0]]
            return
        matches = np.flatnonzero(cells[0] == digit)
        hints[position] = self._register_ids[int(matches[0])] if len(matches) else self._absent_id

    def _row(self, pages: int, twins: float) -> tuple[list[int], Question, NDArray[np.int64], NDArray[np.int64]]:
        kinds = KINDS_OF_PAGES[pages]
        kind = kinds[int(self._random.integers(len(kinds)))]
        while True:
            if self._random.random() < twins:
                pool_indices = np.full(pages, -1)
                cells = self._random.integers(EMPTY, size=(pages, CELLS))
                for row in cells:
                    row[self._random.permutation(CELLS)[: int(self._random.integers(CELLS))]] = EMPTY
            else:
                pool_indices = self._random.integers(len(self._cells), size=pages)
                cells = self._cells[pool_indices]
            if fits(kind, cells.tolist()):
                break
        question = ask(kind, cells.tolist(), self._random)
        key = (question.text, pages)
        if key not in self._prompts:
            self._prompts[key] = prompt(self._tokenizer, question.text, pages, page_tokens=self._page_tokens)
        answer = self._tokenizer.encode(question.answer, add_special_tokens=False).ids
        return [*self._prompts[key], *answer, END_ID], question, cells, pool_indices


def character_ids(tokenizer: Tokenizer) -> Tensor:
    """Token ids of the ten digits and the dash of an empty cell, int64 [11]."""
    return torch.tensor([tokenizer.token_to_id(character) for character in "0123456789-"])


def token_cells(cells: Tensor) -> Tensor:
    """Cell content of each page token: [..., 4] to [..., 16]."""
    return cells[..., list(CELL_OF_TOKEN)]


assert len(CELL_OF_TOKEN) == PAGE_TOKENS  # noqa: S101
assert max(pages for _, pages in PAGES.values()) == len(SHARES) - 1  # noqa: S101
