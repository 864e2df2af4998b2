"""How the small networks are trained: steps of an optimiser along one cycle of the learning rate."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

WARM_UP_SHARE = 0.1
MOST_GRADIENT_NORM = 1.0
SMALL_WARM_UP_SHARE = 0.15
SMALL_WEIGHT_DECAY = 0.02


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast one network learns."""

    steps: int
    batch: int
    peak_rate: float
    seed: int


def learn(
    network: nn.Module,
    loss: Callable[[], Tensor],
    schedule: Schedule,
    *,
    most_gradient_norm: float,
    advance: Callable[[float], None],
) -> None:
    """Train all of a network by AdamW and leave it in evaluation mode; `advance` is told the loss of each step."""
    rate = schedule.peak_rate
    network.train()
    train_epochs(
        torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=SMALL_WEIGHT_DECAY),
        loss,
        peak_rate=rate,
        steps=schedule.steps,
        advance=advance,
        warm_up_share=SMALL_WARM_UP_SHARE,
        most_gradient_norm=most_gradient_norm,
    )
    network.eval()


def train_epochs(
    optimiser: torch.optim.Optimizer,
    loss: Callable[[], Tensor],
    *,
    peak_rate: float,
    steps: int,
    advance: Callable[[float], None],
    warm_up_share: float = WARM_UP_SHARE,
    most_gradient_norm: float = MOST_GRADIENT_NORM,
) -> None:
    """Take `steps` steps; `advance` is told the loss of each."""
    weights: list[Tensor] = [one for group in optimiser.param_groups for one in group["params"]]
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=peak_rate, total_steps=steps, pct_start=warm_up_share)
    for _ in range(steps):
        optimiser.zero_grad(set_to_none=True)
        step_loss = loss()
        torch.autograd.backward(step_loss)
        nn.utils.clip_grad_norm_(weights, most_gradient_norm)
        optimiser.step()
        cycle.step()
        advance(float(step_loss.detach()))
