"""Tokenizer of lmm-digits: byte-level BPE with one token per digit.

Text is never encoded as a special token; `prompt` inserts placeholders as ids.
"""

from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from trimtab_model_servers.families.lmm_digits import CELLS

PAD, END, USER, ASSISTANT, IMAGE = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|image|>"
REGISTERS: Final = tuple(f"<|cell-{cell + 1}|>" for cell in range(CELLS))
"""Tokens after each page, one per cell."""

SPECIAL: Final = (PAD, END, USER, ASSISTANT, IMAGE, *REGISTERS)
VOCABULARY: Final = 384
_PATH: Final = Path(__file__).with_name("tokenizer.json")


def load_default_tokenizer() -> Tokenizer:
    """Load the tokenizer of new models."""
    return read_tokenizer(_PATH.read_text())


def read_tokenizer(content: str) -> Tokenizer:
    """Parse a tokenizer; ValueError if it is none."""
    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"not a tokenizer of the tokenizers library: {error}") from error
    tokenizer.encode_special_tokens = True
    return tokenizer


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token; ValueError if the tokenizer lacks it."""
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise ValueError(f"the tokenizer has no token {token!r}; use the tokenizer of the weights")
    return int(token_id)


def prompt(tokenizer: Tokenizer, text: str, pages: int, *, page_tokens: int) -> list[int]:
    """Encode one user turn, pages first, and the start of the assistant's turn.

    Each page has ``page_tokens`` placeholders (`models.placeholders`) and a register for each cell.
    """
    page = [special_id(tokenizer, IMAGE)] * page_tokens
    page += [special_id(tokenizer, register) for register in REGISTERS]
    question = tokenizer.encode(text, add_special_tokens=False).ids
    return [special_id(tokenizer, USER), *page * pages, *question, special_id(tokenizer, ASSISTANT)]
