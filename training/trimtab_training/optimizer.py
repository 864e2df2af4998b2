"""AdamW with one learning-rate cycle, the optimizer of every training suite."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Advance = Callable[[float], None]
"""Receives the loss of each step."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Length and rate of one training run."""

    steps: int
    batch: int
    peak_rate: float
    seed: int


def minimize(
    parameters: Iterable[nn.Parameter] | list[dict[str, Any]],
    loss: Callable[[], Tensor],
    schedule: Schedule,
    *,
    weight_decay: float = 0.02,
    betas: tuple[float, float] = (0.9, 0.999),
    warm_up_share: float = 0.1,
    max_gradient_norm: float = 1.0,
    advance: Advance = lambda _: None,
) -> None:
    """Minimize a loss over parameters or parameter groups; `loss` draws its own batches."""
    optimizer = torch.optim.AdamW(parameters, lr=schedule.peak_rate, weight_decay=weight_decay, betas=betas)
    weights: list[Tensor] = [weight for group in optimizer.param_groups for weight in group["params"]]
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=schedule.peak_rate, total_steps=schedule.steps, pct_start=warm_up_share
    )
    for _ in range(schedule.steps):
        optimizer.zero_grad(set_to_none=True)
        step_loss = loss()
        torch.autograd.backward(step_loss)
        nn.utils.clip_grad_norm_(weights, max_gradient_norm)
        optimizer.step()
        cycle.step()
        advance(float(step_loss.detach()))
