"""Speed-up of a vision transformer by merged tokens, in seconds and in operations.

Every delta is timed in every round, so that other load of the machine affects all alike; a delta's figure is the median
over rounds of its ratio to delta 0 in the same round. Weights of ViT-B/16 are random: they do not affect the speed.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import Progress
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness.report import Report
from trimtab.options import console
from trimtab_model_servers.transformer.checkpoints import load, random_checkpoint
from trimtab_model_servers.transformer.config import SHAPES
from trimtab_model_servers.transformer.merging import RULES
from trimtab_model_servers.transformer.transformer import ForwardPlan, VisionTransformer

BASE_DELTAS = (0, 5, 10, 15, 20, 25)
SMALL_DELTAS = (0, 4, 6, 8, 10)
PIPELINE = Path("pipelines/vit-tasks/weights/vit-tasks.safetensors")
CPU_SHARE, GPU_SHARE = 0.6, 0.8
"""Of the ratio of multiply-accumulates, how much the speed-up must reach."""
GPU_LEAST_BATCH = 32


@dataclass(frozen=True, slots=True)
class Setting:
    """One model at one batch size, at all of its deltas."""

    name: str
    transformer: VisionTransformer
    batch: int
    deltas: Sequence[int]
    rounds: int


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run(setting: Setting, device: torch.device, rule: str, progress: Progress) -> dict[int, list[float]]:
    """Return the seconds of every delta in every round, after one round of warm-up."""
    shape = setting.transformer.shape
    images = torch.randn(setting.batch, shape.channels, shape.side, shape.side, device=device)
    seconds: dict[int, list[float]] = {delta: [] for delta in setting.deltas}
    task = progress.add_task(f"{setting.name}, batch {setting.batch}", total=(setting.rounds + 1) * len(setting.deltas))
    with torch.inference_mode():
        for _ in range(setting.rounds + 1):
            for delta in setting.deltas:
                plan = ForwardPlan((delta,) * shape.depth, RULES[rule])
                seconds[delta].append(_forward_seconds(setting.transformer, images, plan))
                progress.advance(task)
    return {delta: rounds[1:] for delta, rounds in seconds.items()}


def _forward_seconds(transformer: VisionTransformer, images: torch.Tensor, plan: ForwardPlan) -> float:
    _synchronize(images.device)
    began = time.perf_counter()
    transformer(images, plan)
    _synchronize(images.device)
    return time.perf_counter() - began


def operations(transformer: VisionTransformer, plan: ForwardPlan) -> int:
    """Floating-point operations for one image."""
    shape = transformer.shape
    image = torch.zeros(1, shape.channels, shape.side, shape.side, device=transformer.cls_token.device)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        transformer(image, plan)
    return int(counter.get_total_flops())


def judge(setting: Setting, seconds: dict[int, list[float]], report: Report, min_share: float | None) -> None:
    """Add a setting's figures to the report; each speed-up must reach `min_share` of the ratio of operations."""
    depth = setting.transformer.shape.depth
    costs = {
        delta: operations(setting.transformer, ForwardPlan((delta,) * depth, RULES["bipartite"]))
        for delta in setting.deltas
    }
    for delta, rounds in seconds.items():
        name = f"{setting.name}_batch_{setting.batch}_merge_{delta}"
        speed_up = statistics.median(plain / own for plain, own in zip(seconds[0], rounds, strict=True))
        fewer_operations = costs[0] / costs[delta]
        report.add(
            {
                f"{name}_images_per_second": round(setting.batch / statistics.median(rounds), 2),
                f"{name}_speed_up_ratio": round(speed_up, 3),
                f"{name}_multiplications_ratio": round(fewer_operations, 3),
            }
        )
        if delta and min_share is not None:
            share = speed_up / fewer_operations
            report.hold(f"{name}: speed-up over ratio of multiplications", share, ">=", min_share)


def settings(options: argparse.Namespace) -> list[Setting]:
    """Return ViT-B/16 at batch 8 and 32, and the small trained transformer if its weights exist."""
    device = torch.device(options.device)
    base = random_checkpoint(SHAPES["base"], 1).transformer.to(device)
    timed = [Setting("base", base, batch, BASE_DELTAS, options.rounds) for batch in (8, 32)]
    if options.small.is_file():
        small = load(options.small).transformer.to(device)
        timed += [Setting("small", small, batch, SMALL_DELTAS, 8 * options.rounds) for batch in (8, 32)]
    return timed


def main() -> int:
    """Time every setting; 0 if every threshold holds."""
    parser = argparse.ArgumentParser(prog="benchmarks tokens", description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--rule", choices=list(RULES), default="bipartite")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--small", type=Path, default=PIPELINE, help="weights of the small trained transformer")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    report = Report("bench-tokens", {"device": str(device), "rule": options.rule, "threads": options.threads})
    with Progress(console=console) as progress:
        for setting in settings(options):
            judge(setting, run(setting, device, options.rule, progress), report, _min_share(setting, device))
    return report.finish()


def _min_share(setting: Setting, device: torch.device) -> float | None:
    """Return what a speed-up must reach; None for a transformer so small that calls cost more than computation."""
    if setting.name != "base":
        return None
    if device.type == "cuda":
        return GPU_SHARE if setting.batch >= GPU_LEAST_BATCH else None
    return CPU_SHARE
