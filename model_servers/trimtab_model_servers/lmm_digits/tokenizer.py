"""The models' own tokenizer: byte-level BPE trained on the questions, so that any text can be spelled and read back.

A digit is always a token of its own. Text never makes a special token: placeholders are put in by ``prompt`` as ids.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trimtab_model_servers.lmm_digits.page_generator import CELLS, EMPTY
from trimtab_model_servers.lmm_digits.questions import PAGES, Kind, ask, fits

PAD, END, USER, ASSISTANT, IMAGE = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|image|>"
REGISTERS: Final = tuple(f"<|cell-{cell + 1}|>" for cell in range(CELLS))
"""Stand behind each page: where what was seen in a cell is kept."""

SPECIAL: Final = (PAD, END, USER, ASSISTANT, IMAGE, *REGISTERS)
VOCABULARY: Final = 384


def train_tokenizer() -> Tokenizer:
    """Train the tokenizer on every wording of every question; the same each time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_wordings(), trainer)
    tokenizer.encode_special_tokens = True  # a caller who writes "<|image|>" gets its letters
    return tokenizer


def read_tokenizer(written: str) -> Tokenizer:
    """Read a tokenizer; what a text spells is never taken for a special token.

    Raises:
        ValueError: it is none.
    """
    try:
        tokenizer = Tokenizer.from_str(written)
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"no tokenizer of the tokenizers library: {error}") from error
    tokenizer.encode_special_tokens = True
    return tokenizer


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token.

    Raises:
        ValueError: when the tokenizer has none such.
    """
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token!r}; it should be the one that lies beside the weights")
    return int(found)


def prompt(tokenizer: Tokenizer, text: str, pages: int, *, page_tokens: int) -> list[int]:
    """Spell one turn: the user's pages, the question, and the assistant's turn to speak.

    Args:
        tokenizer: the models' own.
        text: what is asked.
        pages: how many pages come before it.
        page_tokens: placeholders a page: its tokens in a decoder-only model, one in a model that attends across. A
            register for each cell follows.
    """
    page = [special_id(tokenizer, IMAGE)] * page_tokens
    page += [special_id(tokenizer, register) for register in REGISTERS]
    words = tokenizer.encode(text, add_special_tokens=False).ids
    return [special_id(tokenizer, USER), *page * pages, *words, special_id(tokenizer, ASSISTANT)]


def _wordings() -> Iterator[str]:
    random = np.random.default_rng(0)
    for kind in Kind:
        for _ in range(200):
            pages = [tuple(int(cell) for cell in random.integers(EMPTY + 1, size=CELLS)) for _ in range(PAGES[kind][1])]
            if fits(kind, pages) and all(set(cells) != {EMPTY} for cells in pages):
                yield ask(kind, pages, random).text
