"""Token ids between stages, and as inputs of BERT.

Between stages a text is INT64 [B, L], one id per token, without special tokens; -1 is padding at any position. A model
reads left-aligned rows with its own special tokens, as wide as the longest row of the batch.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

NO_TOKEN = -1
PADDING, UNKNOWN, BEGIN, END = 0, 100, 101, 102
"""Special tokens of BERT."""


def pack(tokens: Tensor, max_tokens: int | None = None) -> Tensor:
    """Left-align the tokens of each row [B, L], keep at most `max_tokens`, and cut columns without tokens."""
    absent = tokens < 0
    order = absent.to(torch.uint8).argsort(dim=1, stable=True)
    width = min(int((~absent).sum(dim=1).max()), tokens.shape[1] if max_tokens is None else max_tokens)
    return tokens.gather(1, order)[:, :width]


def model_inputs(tokens: Tensor, max_tokens: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Ids and mask of texts [B, L], cut to `max_tokens` with their special tokens."""
    text = pack(tokens, max_tokens - 2)
    known = text.masked_fill(text >= vocabulary, UNKNOWN)
    framed = pack(torch.cat([pad(known, (1, 0), value=BEGIN), known.new_full((len(known), 1), END)], dim=1))
    return framed.masked_fill(framed < 0, PADDING), (framed >= 0).to(torch.int64)


def resize_width(tokens: Tensor, width: int) -> Tensor:
    """Cut or pad rows [B, L] to a fixed width, so that the next stage can batch them."""
    missing = width - tokens.shape[1]
    return pad(tokens, (0, missing), value=NO_TOKEN) if missing >= 0 else tokens[:, :width]


def collapse_repeats(letters: Tensor, blank: int) -> Tensor:
    """Join equal neighbors of [B, frames] and drop blanks (CTC)."""
    repeated = torch.zeros_like(letters, dtype=torch.bool)
    repeated[:, 1:] = letters[:, 1:] == letters[:, :-1]
    return pack(letters.masked_fill(repeated | (letters == blank), NO_TOKEN))
