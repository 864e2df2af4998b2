"""Token ids between stages, and as model inputs.

Between stages a text is INT64 [B, L], one id per token, without special tokens; -1 is padding at any position. A model
reads left-aligned rows with its own special tokens, as wide as the longest row of the batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

NO_TOKEN = -1


def pack(tokens: Tensor, max_tokens: int | None = None) -> Tensor:
    """Left-align the tokens of each row [B, L], keep at most `max_tokens`, and cut columns without tokens."""
    absent = tokens < 0
    order = absent.to(torch.uint8).argsort(dim=1, stable=True)
    width = min(int((~absent).sum(dim=1).max()), tokens.shape[1] if max_tokens is None else max_tokens)
    return tokens.gather(1, order)[:, :width]


def replace_unknown(tokens: Tensor, vocabulary: int, unknown: int) -> Tensor:
    """Replace ids outside the vocabulary by the unknown token, as a tokenizer would."""
    return tokens.masked_fill(tokens >= vocabulary, unknown)


def frame(parts: Sequence[Tensor | Sequence[int]]) -> Tensor:
    """Join tokens [B, L] and lists of special tokens to packed rows."""
    rows = next(part.shape[0] for part in parts if isinstance(part, Tensor))
    columns = [part if isinstance(part, Tensor) else torch.tensor([list(part)] * rows) for part in parts]
    return pack(torch.cat([column.reshape(rows, -1).to(torch.int64) for column in columns], dim=1))


def pad_tokens(tokens: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """Model input: ids with the model's padding, and the mask [B, L], 1 for tokens and 0 for padding."""
    mask = (tokens >= 0).to(torch.int64)
    return tokens.masked_fill(tokens < 0, padding), mask


def model_inputs(
    tokens: Tensor,
    max_tokens: int,
    vocabulary: int,
    *,
    begin: Sequence[int] = (101,),
    end: Sequence[int] = (102,),
    unknown: int = 100,
    padding: int = 0,
) -> tuple[Tensor, Tensor]:
    """Ids and mask of texts [B, L], cut to `max_tokens` with their special tokens; the defaults are BERT's."""
    text = replace_unknown(pack(tokens, max_tokens - len(begin) - len(end)), vocabulary, unknown)
    return pad_tokens(frame([begin, text, end]), padding)


def token_counts(tokens: Tensor) -> Tensor:
    return (tokens >= 0).sum(dim=1)


def resize_width(tokens: Tensor, width: int) -> Tensor:
    """Cut or pad rows [B, L] to a fixed width, so that the next stage can batch them."""
    missing = width - tokens.shape[1]
    return torch.nn.functional.pad(tokens, (0, missing), value=NO_TOKEN) if missing >= 0 else tokens[:, :width]
