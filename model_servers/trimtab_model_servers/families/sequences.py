"""Token ids as they cross between stages, and as a model reads them. Pure.

On the wire a text is INT64 [B, L], one id a token, without any special tokens; -1 is no token. A model reads rows that
begin together and carry its own special tokens, so padding is dropped here wherever it stands, and only the longest row
of a batch decides how wide the model's input is.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

NO_TOKEN = -1


def packed(tokens: Tensor, most: int | None = None) -> Tensor:
    """Move the tokens of each row [B, L] to its beginning, keep at most `most`, and cut what no row fills."""
    absent = tokens < 0
    order = absent.to(torch.uint8).argsort(dim=1, stable=True)
    width = min(int((~absent).sum(dim=1).max()), tokens.shape[1] if most is None else most)
    return tokens.gather(1, order)[:, :width]


def known(tokens: Tensor, vocabulary: int, unknown: int) -> Tensor:
    """Replace ids that the model has no embedding for by its unknown token, as a tokenizer would."""
    return tokens.masked_fill(tokens >= vocabulary, unknown)


def framed(parts: Sequence[Tensor | Sequence[int]]) -> Tensor:
    """Join tokens [B, L] and the special tokens between them (a list of ids) to packed rows."""
    rows = next(part.shape[0] for part in parts if isinstance(part, Tensor))
    columns = [part if isinstance(part, Tensor) else torch.tensor([list(part)] * rows) for part in parts]
    return packed(torch.cat([column.reshape(rows, -1).to(torch.int64) for column in columns], dim=1))


def padded(tokens: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """What a model reads: ids with its own padding, and the mask [B, L] of what is a token (1) or not (0)."""
    mask = (tokens >= 0).to(torch.int64)
    return tokens.masked_fill(tokens < 0, padding), mask


def lengths(tokens: Tensor) -> Tensor:
    """Tokens of each row, [B]."""
    return (tokens >= 0).sum(dim=1)


def widened(tokens: Tensor, width: int) -> Tensor:
    """Cut or pad rows [B, L] to one width, so that the next stage's batches form whatever was written."""
    missing = width - tokens.shape[1]
    return torch.nn.functional.pad(tokens, (0, missing), value=NO_TOKEN) if missing >= 0 else tokens[:, :width]
