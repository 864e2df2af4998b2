"""Merge rules: which patches merge into which.

Rules are bipartite soft matching (ToMe, Bolya et al. 2023, section 3), the energy score (PiToMe, Tran et al. 2024,
section 3), and a rule for strong rates guided by the class token's attention, as in RAPID (2026).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

ENERGY_MARGIN = 0.9
"""PiToMe's margin in the first layer; it falls to 0 in the last."""


def gather_weights(rows: Tensor, chosen: Tensor) -> Tensor:
    """Take rows [B, N, ...] by index [B, K]: [B, K, ...]. Copying whole rows is fastest on CPUs."""
    batch, count = rows.shape[:2]
    flat = rows.reshape(batch * count, *rows.shape[2:])
    return flat.index_select(0, _flat_indices(chosen, count)).view(*chosen.shape, *rows.shape[2:])


def merge_tokens(tokens: Tensor, sizes: Tensor, kept: Tensor, gone: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
    """Merge tokens [B, N, d] into others; the sums of sizes [B, N] and of size times token do not change.

    ``kept`` [B, K] are indices of the remaining tokens in their new order, ``gone`` [B, N − K] those of the merged
    ones, ``into`` [B, N − K] the index among the kept that each merges into. Returns tokens [B, K, d] and sizes [B, K].
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


@dataclass(frozen=True, slots=True)
class MergeInputs:
    """Attention of a layer to its patches."""

    keys: Tensor
    """[B, N, d], mean over the heads."""
    importance: Tensor | None
    """[B, N], attention of the class token to each patch, mean over the heads, for rules that need it."""
    progress: float
    """0 in the first layer, towards 1 in the last."""


Merge = Callable[[Tensor, Tensor, MergeInputs, int], tuple[Tensor, Tensor]]
"""Maps tokens [B, N, d], sizes [B, N], inputs and r ≤ N // 2 to tokens [B, N − r, d] and sizes [B, N − r]."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Merge function, and whether it needs the class token's attention."""

    merge: Merge
    needs_importance: bool = False


def bipartite(tokens: Tensor, sizes: Tensor, inputs: MergeInputs, merged: int) -> tuple[Tensor, Tensor]:
    """Match every second patch with the most similar of the others and merge the closest pairs (ToMe, appendix D).

    Unmerged patches come first, then the matched ones; the order determines the matching of the next layer.
    """
    with torch.no_grad():
        keys = normalize(inputs.keys, dim=-1)
        similarity, partner = (keys[:, 1::2] @ keys[:, 0::2].transpose(1, 2)).max(dim=2)
        going, staying = split(similarity, merged)
        targets = torch.arange(0, tokens.shape[1], 2, device=tokens.device).expand(tokens.shape[0], -1)
        kept = torch.cat([2 * staying + 1, targets], dim=1)
        into = partner.gather(1, going) + staying.shape[1]
    return merge_tokens(tokens, sizes, kept, 2 * going + 1, into)


def energy(tokens: Tensor, sizes: Tensor, inputs: MergeInputs, merged: int) -> tuple[Tensor, Tensor]:
    """Pair patches that resemble many others, and keep isolated ones (PiToMe, equations 4 to 6)."""
    with torch.no_grad():
        keys = normalize(inputs.keys, dim=-1)
        similarity = keys @ keys.transpose(1, 2)
        margin = ENERGY_MARGIN * (1 - inputs.progress)
        energies = torch.where(similarity >= margin, similarity, torch.expm1(similarity - margin)).mean(dim=2)
        pairs, alone = split(energies, 2 * merged)
        going, partners = pairs[:, 0::2], pairs[:, 1::2]
        between = gather_weights(similarity, going).gather(2, partners[:, None].expand(-1, merged, -1))
        into = between.argmax(dim=2) + alone.shape[1]
        kept = torch.cat([alone, partners], dim=1)
    return merge_tokens(tokens, sizes, kept, going, into)


def guided(tokens: Tensor, sizes: Tensor, inputs: MergeInputs, merged: int) -> tuple[Tensor, Tensor]:
    """Merge patches that resemble a more attended patch into the most similar remaining one.

    Any patch may merge into any other, so that at strong rates close pairs are not separated by their positions.
    Attention only decides which of two similar patches remains (decision 39).
    """
    if inputs.importance is None:
        raise ValueError("the rule 'guided' needs the class token's attention; this transformer has no class token")
    with torch.no_grad():
        keys = normalize(inputs.keys, dim=-1)
        similarity = keys @ keys.transpose(1, 2)
        importance, position = inputs.importance, torch.arange(keys.shape[1], device=keys.device)
        earlier = (importance[:, None, :] == importance[:, :, None]) & (position[None, :] < position[:, None])
        more_attended = (importance[:, None, :] > importance[:, :, None]) | earlier
        gone, kept = split(torch.where(more_attended, similarity, -torch.inf).amax(dim=2), merged)
        into = gather_weights(similarity, gone).gather(2, kept[:, None].expand(-1, merged, -1)).argmax(dim=2)
    return merge_tokens(tokens, sizes, kept, gone, into)


RULES: Mapping[str, Rule] = {
    "bipartite": Rule(bipartite),
    "energy": Rule(energy),
    "guided": Rule(guided, needs_importance=True),
}
"""Rules by name; the first is the default."""


def in_each_layer(schedule: Sequence[int], depth: int) -> tuple[int, ...]:
    """A schedule of every layer from none, one or one for each; ValueError for another number of numbers."""
    if len(schedule) in {0, 1}:
        return tuple(schedule or (0,)) * depth
    if len(schedule) != depth:
        raise ValueError(
            f"a schedule of {len(schedule)} numbers; this transformer has {depth} layers: give 1 or {depth}"
        )
    return tuple(schedule)


def clamp_r(merged: int, mergeable: int) -> int:
    """Limit the merged tokens of a layer to half of the mergeable ones."""
    return max(0, min(merged, mergeable // 2))
