"""Merging of tokens: a mean weighted by the number of patches of each token."""

import torch
from torch import Tensor


def gather_weights(rows: Tensor, chosen: Tensor) -> Tensor:
    """Take rows [B, N, ...] by index [B, K]: [B, K, ...]. Copying whole rows is fastest on CPUs."""
    batch, count = rows.shape[:2]
    flat = rows.reshape(batch * count, *rows.shape[2:])
    return flat.index_select(0, _flat_indices(chosen, count)).view(*chosen.shape, *rows.shape[2:])


def merge_tokens(tokens: Tensor, sizes: Tensor, kept: Tensor, gone: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
    """Merge each of some tokens into another one; the sums of sizes and of size times token do not change.

    Args:
        tokens: [B, N, d].
        sizes: [B, N], number of patches of each token.
        kept: [B, K] indices of the remaining tokens, in their new order.
        gone: [B, N − K] indices of the merged tokens.
        into: [B, N − K], the index among the kept that each merges into.

    Returns:
        Tokens [B, K, d] and sizes [B, K].
    """
    mass = tokens * sizes[..., None]
    width, count = tokens.shape[-1], kept.shape[1]
    target = _flat_indices(into, count)
    total = gather_weights(sizes, kept).view(-1).index_add(0, target, gather_weights(sizes, gone).view(-1))
    summed = gather_weights(mass, kept).view(-1, width).index_add(0, target, gather_weights(mass, gone).view(-1, width))
    return (summed / total[:, None]).view(*kept.shape, width), total.view(kept.shape)


def split(score: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices [B, count] of the highest scores [B, N], and of the others in ascending order."""
    order = score.argsort(dim=1, descending=True, stable=True)
    return order[:, :count], order[:, count:].sort(dim=1).values


def _flat_indices(chosen: Tensor, count: int) -> Tensor:
    start = torch.arange(0, chosen.shape[0] * count, count, device=chosen.device)
    return (chosen + start[:, None]).reshape(-1)
