"""The models' own tokenizer: byte-level BPE trained on the questions, so that any text can be spelled and read back.

A digit is always a token of its own. Text never makes a special token: placeholders are put in by ``prompt`` as ids.
"""

from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from trimtab_model_servers.families.lmm_digits import CELLS

PAD, END, USER, ASSISTANT, IMAGE = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|image|>"
REGISTERS: Final = tuple(f"<|cell-{cell + 1}|>" for cell in range(CELLS))
"""Stand behind each page: where what was seen in a cell is kept."""

SPECIAL: Final = (PAD, END, USER, ASSISTANT, IMAGE, *REGISTERS)
VOCABULARY: Final = 384
_PATH: Final = Path(__file__).with_name("tokenizer.json")


def load_default_tokenizer() -> Tokenizer:
    """Load the tokenizer of models with random weights, which `train_tokenizer` of the training package writes."""
    return read_tokenizer(_PATH.read_text())


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
