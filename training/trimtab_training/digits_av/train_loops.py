"""Training: every subset explicitly, so that no sense collapses, and none worse for knowing more.

Early fusion runs its trunk for each subset apart: a step takes one subset and a larger one. Late fusion encodes each
sense once and fuses all seven subsets in every step. Both add a ranking loss (SimMLM, 2025): what knows more may not
lose more than what knows less. After it each subset gets the temperature that fits held-back items best (Guo et al.
2017), and a curve over that (`calibration`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import torch
import torch.nn.functional as fn
from torch import Tensor

from trimtab_model_servers.families.digits_av import MODALITIES, SUBSETS
from trimtab_model_servers.families.digits_av.base import parts, strict_pairs
from trimtab_model_servers.families.digits_av.late_fusion import LateNetwork
from trimtab_model_servers.families.digits_av.variants import Network
from trimtab_training.digits_av.dataset import Items
from trimtab_training.optimizer import Schedule, learn

RANKING_WEIGHT: Final = 0.5
_MOST_GRADIENT_NORM: Final = 2.0
_PAIRS: Final = strict_pairs()
Inputs = dict[str, Tensor]


def to_tensors(items: Items) -> tuple[Inputs, Tensor]:
    """The senses and the digits as tensors."""
    return {name: torch.from_numpy(array) for name, array in items.inputs().items()}, torch.from_numpy(items.digit)


def fit(network: Network, items: Items, schedule: Schedule, advance: Callable[[float], None]) -> None:
    """Train on items, reporting each step's loss to `advance`: AdamW along one cycle of the learning rate.

    Senses of two items with the same digit are exchanged at random: what is said, seen and typed together has nothing
    in common but the digit.
    """
    random = np.random.default_rng(schedule.seed)
    inputs, _ = to_tensors(items)
    same = [np.flatnonzero(items.digit == digit) for digit in range(10)]

    def loss() -> Tensor:
        shown = random.integers(10, size=schedule.batch)
        chosen = {name: torch.from_numpy(_of_each(same, shown, random)) for name in MODALITIES}
        batch = {name: inputs[name][rows] for name, rows in chosen.items()}
        return _loss(network, batch, torch.from_numpy(shown), random)

    learn(network, loss, schedule, most_gradient_norm=_MOST_GRADIENT_NORM, advance=advance)


def _of_each(same: Sequence[np.ndarray], shown: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return np.array([same[digit][random.integers(same[digit].size)] for digit in shown])


def _loss(network: Network, batch: Inputs, digits: Tensor, random: np.random.Generator) -> Tensor:
    if isinstance(network, LateNetwork):
        features = {name: network.encode(name, batch[name]) for name in MODALITIES}
        losses = {subset: _entropy(network.fuse(parts(features, subset)), digits) for subset in SUBSETS}
        ranked = [fn.relu(losses[more] - losses[less].detach()) for less, more in _PAIRS]
        return torch.stack(list(losses.values())).mean() + RANKING_WEIGHT * torch.stack(ranked).mean()
    less, more = _PAIRS[random.integers(len(_PAIRS))]
    with_less, with_more = (_entropy(network.logits(parts(batch, subset)), digits) for subset in (less, more))
    return (with_less + with_more) / 2 + RANKING_WEIGHT * fn.relu(with_more - with_less.detach())


def _entropy(logits: Tensor, digits: Tensor) -> Tensor:
    return fn.cross_entropy(logits, digits)


def scores(network: Network, items: Items, batch: int = 128) -> dict[tuple[str, ...], Tensor]:
    """Score all items from each subset, before any temperature: [n, 10] each."""
    inputs, _ = to_tensors(items)
    found: dict[tuple[str, ...], Tensor] = {}
    with torch.inference_mode():
        for subset in SUBSETS:
            pieces = [network.logits(parts(some, subset)) for some in _pieces(inputs, batch)]
            found[subset] = torch.cat(pieces)
    return found


def _pieces(inputs: Inputs, size: int) -> Iterator[Inputs]:
    count = len(next(iter(inputs.values())))
    return ({name: tensor[at : at + size] for name, tensor in inputs.items()} for at in range(0, count, size))
