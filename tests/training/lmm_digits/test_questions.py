"""Questions, pages and tokenizer of lmm-digits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_model_servers.families.lmm_digits.tokenizer import (
    IMAGE,
    REGISTERS,
    SPECIAL,
    load_default_tokenizer,
    prompt,
    special_id,
)
from trimtab_training.lmm_digits.page_generator import EMPTY, CellPageSource
from trimtab_training.lmm_digits.questions import PAGES, Kind, ask, fits, format_cells

TOKENIZER = load_default_tokenizer()
CELLS = st.lists(st.integers(0, EMPTY), min_size=4, max_size=4).filter(lambda cells: set(cells) != {EMPTY})
PAGES_OF_CELLS = st.lists(CELLS, max_size=3)


@given(PAGES_OF_CELLS, st.sampled_from(Kind), st.integers(0, 99))
def test_answer_follows_from_the_cells(pages, kind, seed):
    if not fits(kind, pages):
        with pytest.raises(ValueError, match="exactly one answer"):
            ask(kind, pages, np.random.default_rng(seed))
        return
    question = ask(kind, pages, np.random.default_rng(seed))
    digits = [[cell for cell in cells if cell != EMPTY] for cells in pages]
    numbers = [int(character) for character in question.text if character.isdigit()]
    expected = {
        Kind.COUNT: lambda: str(len(digits[0])),
        Kind.READ: lambda: "".join(str(cell) if cell < EMPTY else "-" for cell in pages[0]),
        Kind.LARGEST: lambda: str(max(digits[0])),
        Kind.SMALLEST: lambda: str(min(digits[0])),
        Kind.PRESENT: lambda: "yes" if numbers[0] in digits[0] else "no",
        Kind.MORE: lambda: str(1 + max(range(len(pages)), key=lambda page: len(digits[page]))),
        Kind.READ_PAGE: lambda: format_cells(pages[numbers[0] - 1]),
        Kind.SUM: lambda: str(sum(numbers)),
    }[kind]()
    assert question.answer == expected


@given(st.text(max_size=30))
def test_text_round_trips_without_special_tokens(text):
    forged = text + IMAGE + text
    ids = TOKENIZER.encode(forged, add_special_tokens=False).ids

    assert TOKENIZER.decode(ids, skip_special_tokens=False) == forged
    assert not {special_id(TOKENIZER, token) for token in SPECIAL} & set(ids)


@pytest.mark.parametrize("page_tokens", [16, 1])
def test_prompt_has_the_placeholders_of_each_page_once(page_tokens):
    ids = prompt(TOKENIZER, "Read page 2.", 3, page_tokens=page_tokens)

    assert ids.count(special_id(TOKENIZER, IMAGE)) == 3 * page_tokens
    assert ids.count(special_id(TOKENIZER, REGISTERS[0])) == 3


def test_pages_are_deterministic_with_one_to_four_digits():
    pages = [CellPageSource("train", 1).page(index) for index in range(60)]
    repeated = [CellPageSource("train", 1).page(index) for index in range(60)]

    assert all(
        (first.pixels == second.pixels).all() and first.cells == second.cells
        for first, second in zip(pages, repeated, strict=True)
    )
    assert {sum(cell != EMPTY for cell in page.cells) for page in pages} == {1, 2, 3, 4}
    assert (CellPageSource("held-out", 1).page(0).pixels != pages[0].pixels).any()
    with pytest.raises(ValueError, match="pages count from 0"):
        CellPageSource("train").page(-1)


def test_every_kind_fits_its_smallest_number_of_pages():
    assert all(fits(kind, [[1, 2, 3, 4], [1, EMPTY, EMPTY, EMPTY]][: PAGES[kind][0]]) for kind in Kind)
