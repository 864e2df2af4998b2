"""Merging tokens into others: a weighted mean, in which each token counts for as many patches as it stands for."""

import torch
from torch import Tensor


def gather_weights(rows: Tensor, chosen: Tensor) -> Tensor:
    """Take rows [B, N, ...] by index [B, K]: [B, K, ...]. Whole rows are copied, which processors do fastest."""
    batch, count = rows.shape[:2]
    flat = rows.reshape(batch * count, *rows.shape[2:])
    return flat.index_select(0, _flattened(chosen, count)).view(*chosen.shape, *rows.shape[2:])


def merge_tokens(tokens: Tensor, sizes: Tensor, kept: Tensor, gone: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
    """Merge some tokens into others, each into one; several may go into the same.

    Sum of sizes, and sum of size times token, stay what they were.

    Args:
        tokens: [B, N, d].
        sizes: [B, N], patches each token stands for.
        kept: [B, K] indices of the tokens that stay, in the order in which they are to stand.
        gone: [B, N − K] indices of those that go.
        into: [B, N − K], where among the kept each goes.

    Returns:
        Tokens [B, K, d] and sizes [B, K].
    """
    mass = tokens * sizes[..., None]
    width, count = tokens.shape[-1], kept.shape[1]
    target = _flattened(into, count)
    total = gather_weights(sizes, kept).view(-1).index_add(0, target, gather_weights(sizes, gone).view(-1))
    summed = gather_weights(mass, kept).view(-1, width).index_add(0, target, gather_weights(mass, gone).view(-1, width))
    return (summed / total[:, None]).view(*kept.shape, width), total.view(kept.shape)


def split(score: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the indices [B, count] of the highest scores [B, N], and those of the others in their own order."""
    order = score.argsort(dim=1, descending=True, stable=True)
    return order[:, :count], order[:, count:].sort(dim=1).values


def _flattened(chosen: Tensor, count: int) -> Tensor:
    start = torch.arange(0, chosen.shape[0] * count, count, device=chosen.device)
    return (chosen + start[:, None]).reshape(-1)
