"""Which tokens merge, and into which. One function a rule, one signature; all see the patches only.

Written from the papers alone: bipartite soft matching (ToMe, Bolya et al. 2023, section 3), the energy score (PiToMe,
Tran et al. 2024, section 3), and a class-guided rule for strong rates, which takes from RAPID (2026) that the class
token is asked what may go.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from trimtab_model_servers.transformer.merge import gather_weights, merge_tokens, split

ENERGY_MARGIN = 0.9
"""PiToMe's margin in the first layer; it falls to nothing by the last."""


@dataclass(frozen=True, slots=True)
class MergeInputs:
    """What this layer's attention tells of the patches.

    Attributes:
        keys: [B, N, d], the mean over the heads.
        importance: [B, N], attention that the class token pays each, the mean over the heads; only where asked for.
        progress: 0 in the first layer, towards 1 in the last.
    """

    keys: Tensor
    importance: Tensor | None
    progress: float


Merge = Callable[[Tensor, Tensor, MergeInputs, int], tuple[Tensor, Tensor]]
"""Tokens [B, N, d], sizes [B, N], evidence and a number r, at most N // 2: tokens [B, N − r, d], sizes [B, N − r]."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A way to merge, and whether it needs the class token's attention, which is computed for it alone."""

    merge: Merge
    needs_importance: bool = False


def bipartite(tokens: Tensor, sizes: Tensor, evidence: MergeInputs, merged: int) -> tuple[Tensor, Tensor]:
    """Every second patch seeks the likest of the others; the closest pairs merge (ToMe, appendix D).

    The unmerged seekers come first, then those sought: which patch seeks in the next layer follows from that order.
    """
    with torch.no_grad():
        keys = normalize(evidence.keys, dim=-1)
        best, partner = (keys[:, 1::2] @ keys[:, 0::2].transpose(1, 2)).max(dim=2)
        going, staying = split(best, merged)
        sought = torch.arange(0, tokens.shape[1], 2, device=tokens.device).expand(tokens.shape[0], -1)
        kept = torch.cat([2 * staying + 1, sought], dim=1)
        into = partner.gather(1, going) + staying.shape[1]
    return merge_tokens(tokens, sizes, kept, 2 * going + 1, into)


def energy(tokens: Tensor, sizes: Tensor, evidence: MergeInputs, merged: int) -> tuple[Tensor, Tensor]:
    """Patches that resemble many others pair up; those that stand alone are kept (PiToMe, equations 4 to 6)."""
    with torch.no_grad():
        keys = normalize(evidence.keys, dim=-1)
        likeness = keys @ keys.transpose(1, 2)
        margin = ENERGY_MARGIN * (1 - evidence.progress)
        crowded = torch.where(likeness >= margin, likeness, torch.expm1(likeness - margin)).mean(dim=2)
        pairs, alone = split(crowded, 2 * merged)
        going, partners = pairs[:, 0::2], pairs[:, 1::2]
        between = gather_weights(likeness, going).gather(2, partners[:, None].expand(-1, merged, -1))
        into = between.argmax(dim=2) + alone.shape[1]
        kept = torch.cat([alone, partners], dim=1)
    return merge_tokens(tokens, sizes, kept, going, into)


def guided(tokens: Tensor, sizes: Tensor, evidence: MergeInputs, merged: int) -> tuple[Tensor, Tensor]:
    """A patch that resembles one to which the class token listens more goes into the likest that stays.

    Any patch may go and any may stay, unlike where every second one seeks: at strong rates the closest pairs are not
    cut apart by where they stand. Attention decides which of two that are alike stays, nothing more; taking it for a
    patch's worth costs accuracy (decision 39).
    """
    if evidence.importance is None:
        raise ValueError("the rule 'guided' asks the class token what matters; this transformer has none")
    with torch.no_grad():
        keys = normalize(evidence.keys, dim=-1)
        likeness = keys @ keys.transpose(1, 2)
        paid, place = evidence.importance, torch.arange(keys.shape[1], device=keys.device)
        earlier = (paid[:, None, :] == paid[:, :, None]) & (place[None, :] < place[:, None])
        louder = (paid[:, None, :] > paid[:, :, None]) | earlier
        gone, kept = split(torch.where(louder, likeness, -torch.inf).amax(dim=2), merged)
        into = gather_weights(likeness, gone).gather(2, kept[:, None].expand(-1, merged, -1)).argmax(dim=2)
    return merge_tokens(tokens, sizes, kept, gone, into)


RULES: Mapping[str, Rule] = {
    "bipartite": Rule(bipartite),
    "energy": Rule(energy),
    "guided": Rule(guided, needs_importance=True),
}
"""Rules by the name an operating point gives; the first is the one where it gives none."""
