"""How the small transformers are trained: steps of an optimiser along one cycle of the learning rate."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

WARM_UP_SHARE = 0.1
MOST_GRADIENT_NORM = 1.0


def descend(
    optimiser: torch.optim.Optimizer,
    loss: Callable[[], Tensor],
    *,
    peak_rate: float,
    steps: int,
    advance: Callable[[float], None],
) -> None:
    """Take `steps` steps; `advance` is told the loss of each."""
    weights: list[Tensor] = [one for group in optimiser.param_groups for one in group["params"]]
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=peak_rate, total_steps=steps, pct_start=WARM_UP_SHARE)
    for _ in range(steps):
        optimiser.zero_grad(set_to_none=True)
        step_loss = loss()
        torch.autograd.backward(step_loss)
        nn.utils.clip_grad_norm_(weights, MOST_GRADIENT_NORM)
        optimiser.step()
        cycle.step()
        advance(float(step_loss.detach()))
