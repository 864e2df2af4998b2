"""Trainer of every suite: command line, AdamW with one learning-rate cycle, and progress bars."""

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
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

    def metadata(self) -> dict[str, str]:
        """Metadata of the weights."""
        return {name: str(getattr(self, name)) for name in ("seed", "steps", "batch")}


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


def train_network(network: nn.Module, loss: Callable[[], Tensor], schedule: Schedule, **options: Any) -> None:
    """Minimize a loss over all parameters of a network, and leave it in evaluation mode."""
    network.train()
    minimize(network.parameters(), loss, schedule, **options)
    network.eval()


def argument_parser(description: str, choices: Iterable[str] = (), *, threads: int = 1) -> argparse.ArgumentParser:
    """A parser with `--output` and `--threads`, and with `--only` for a suite of several models."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--threads", type=int, default=threads, help=f"training threads (default {threads})")
    if names := list(choices):
        parser.add_argument("--only", choices=names, action="append", help="train this model; repeatable")
    return parser


@contextmanager
def training_progress(threads: int) -> Iterator[Progress]:
    """Set the number of threads, and show progress bars with a name and a note each on stderr."""
    torch.set_num_threads(threads)
    columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True)) as progress:
        yield progress


def loss_bar(progress: Progress, name: str, steps: int) -> Advance:
    """Add a bar that shows a smoothed loss."""
    task, smooth = progress.add_task(name, total=steps, note=""), 0.0

    def advance(loss: float) -> None:
        nonlocal smooth
        smooth = loss if smooth == 0 else 0.98 * smooth + 0.02 * loss
        progress.update(task, advance=1, note=f"loss {smooth:.3f}")

    return advance
