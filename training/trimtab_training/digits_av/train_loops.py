"""Training loops of the digits-av networks, which train every modality subset explicitly.

Early fusion runs its trunk once per subset: a step trains one subset and a larger one. Late fusion encodes each
modality once and fuses all seven subsets in every step. Both add a ranking loss (SimMLM, 2025): a subset's loss may not
exceed that of a smaller one.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch
import torch.nn.functional as fn
from torch import Tensor

from trimtab_model_servers.families.digits_av import MODALITIES, SUBSETS
from trimtab_model_servers.families.digits_av.base import select_modalities, strict_pairs
from trimtab_model_servers.families.digits_av.family import Network
from trimtab_model_servers.families.digits_av.late_fusion import LateNetwork
from trimtab_training.digits_av.dataset import Items
from trimtab_training.trainer import Advance, Schedule, minimize

RANKING_WEIGHT: Final = 0.5
_PAIRS: Final = strict_pairs()
Inputs = dict[str, Tensor]


def to_tensors(items: Items) -> tuple[Inputs, Tensor]:
    return {name: torch.from_numpy(array) for name, array in items.inputs().items()}, torch.from_numpy(items.digit)


def fit(network: Network, items: Items, schedule: Schedule, advance: Advance) -> None:
    """Train a network on items and leave it in evaluation mode.

    Modalities of items with the same digit are exchanged at random, so that they share nothing but the digit.
    """
    random = np.random.default_rng(schedule.seed)
    inputs, _ = to_tensors(items)
    rows_of_digit = [np.flatnonzero(items.digit == digit) for digit in range(10)]

    def loss() -> Tensor:
        digits = random.integers(10, size=schedule.batch)
        rows = {name: torch.from_numpy(_draw_rows(rows_of_digit, digits, random)) for name in MODALITIES}
        batch = {name: inputs[name][indices] for name, indices in rows.items()}
        return _loss(network, batch, torch.from_numpy(digits), random)

    network.train()
    minimize(network.parameters(), loss, schedule, warm_up_share=0.15, max_gradient_norm=2.0, advance=advance)
    network.eval()


def _draw_rows(rows_of_digit: Sequence[np.ndarray], digits: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return np.array([rows_of_digit[digit][random.integers(rows_of_digit[digit].size)] for digit in digits])


def _loss(network: Network, batch: Inputs, digits: Tensor, random: np.random.Generator) -> Tensor:
    if isinstance(network, LateNetwork):
        features = {name: network.encode(name, batch[name]) for name in MODALITIES}
        logits = {subset: network.fuse(select_modalities(features, subset)) for subset in SUBSETS}
        losses = {subset: fn.cross_entropy(scores, digits) for subset, scores in logits.items()}
        ranked = [fn.relu(losses[more] - losses[fewer].detach()) for fewer, more in _PAIRS]
        return torch.stack(list(losses.values())).mean() + RANKING_WEIGHT * torch.stack(ranked).mean()
    fewer_loss, more_loss = (
        fn.cross_entropy(network.logits(select_modalities(batch, subset)), digits)
        for subset in _PAIRS[random.integers(len(_PAIRS))]
    )
    return (fewer_loss + more_loss) / 2 + RANKING_WEIGHT * fn.relu(more_loss - fewer_loss.detach())


def compute_logits(network: Network, items: Items, batch: int = 128) -> dict[tuple[str, ...], Tensor]:
    """Uncalibrated logits [n, 10] of all items, by modality subset."""
    inputs, _ = to_tensors(items)
    with torch.inference_mode():
        return {
            subset: torch.cat([network.logits(select_modalities(part, subset)) for part in _split(inputs, batch)])
            for subset in SUBSETS
        }


def _split(inputs: Inputs, size: int) -> Iterator[Inputs]:
    count = len(next(iter(inputs.values())))
    return ({name: tensor[start : start + size] for name, tensor in inputs.items()} for start in range(0, count, size))
