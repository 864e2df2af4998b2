"""Speed-up of a vision transformer by merged tokens, in seconds and in operations.

Every delta is timed in every round, so that other load of the machine affects all alike; a delta's figure is the median
over rounds of its ratio to delta 0 in the same round. Weights of ViT-B/16 are random: they do not affect the speed.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.progress import Progress
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness.report import Report
from trimtab.options import console
from trimtab_model_servers.transformer.checkpoints import load, random_checkpoint
from trimtab_model_servers.transformer.config import SHAPES
from trimtab_model_servers.transformer.merging import RULES, MergeInputs, Rule
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


@dataclass(slots=True)
class Timed:
    """What one delta took, round by round."""

    seconds: list[float]
    merging_share: float = 0.0
    peak_mebibytes: float | None = None


class Watched:
    """A rule that remembers how long it took."""

    def __init__(self, rule: Rule) -> None:
        self.seconds = 0.0
        self.rule = replace(rule, merge=self._merge)
        self._inner = rule.merge

    def _merge(
        self, tokens: torch.Tensor, sizes: torch.Tensor, evidence: MergeInputs, merged: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        settle(tokens.device)
        began = time.perf_counter()
        found = self._inner(tokens, sizes, evidence, merged)
        settle(tokens.device)
        self.seconds += time.perf_counter() - began
        return found


def settle(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def peak(device: torch.device, found: Timed) -> Iterator[None]:
    """Note the most memory that is resident meanwhile; of a processor only where the kernel lets us begin anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    yield
    if device.type == "cuda":
        found.peak_mebibytes = torch.cuda.max_memory_allocated(device) / 2**20
        return
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        found.peak_mebibytes = int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def run(setting: Setting, device: torch.device, rule: str, progress: Progress) -> dict[int, Timed]:
    """Time every delta in every round."""
    shape = setting.transformer.shape
    images = torch.randn(setting.batch, shape.channels, shape.side, shape.side, device=device)
    found = {delta: Timed([]) for delta in setting.deltas}
    task = progress.add_task(f"{setting.name}, batch {setting.batch}", total=(setting.rounds + 1) * len(setting.deltas))
    with torch.inference_mode():
        for delta in setting.deltas:  # also warms up
            watched = Watched(RULES[rule])
            with peak(device, found[delta]):
                seconds = _once(setting.transformer, images, ForwardPlan((delta,) * shape.depth, watched.rule))
            found[delta].merging_share = watched.seconds / seconds
            progress.advance(task)
        for _ in range(setting.rounds):
            for delta in setting.deltas:
                course = ForwardPlan((delta,) * shape.depth, RULES[rule])
                found[delta].seconds.append(_once(setting.transformer, images, course))
                progress.advance(task)
    return found


def _once(transformer: VisionTransformer, images: torch.Tensor, course: ForwardPlan) -> float:
    settle(images.device)
    began = time.perf_counter()
    transformer(images, course)
    settle(images.device)
    return time.perf_counter() - began


def operations(transformer: VisionTransformer, plan: ForwardPlan) -> int:
    """Floating-point operations for one image."""
    shape = transformer.shape
    image = torch.zeros(1, shape.channels, shape.side, shape.side, device=transformer.cls_token.device)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        transformer(image, plan)
    return int(counter.get_total_flops())


def judge(setting: Setting, timings: dict[int, Timed], report: Report, min_share: float | None) -> None:
    """Add a setting's figures to the report; each speed-up must reach `min_share` of the ratio of operations."""
    shape = setting.transformer.shape
    costs = {
        delta: operations(setting.transformer, ForwardPlan((delta,) * shape.depth, RULES["bipartite"]))
        for delta in setting.deltas
    }
    for delta, timed in timings.items():
        name = f"{setting.name}_batch_{setting.batch}_merge_{delta}"
        ratios = [plain / own for plain, own in zip(timings[0].seconds, timed.seconds, strict=True)]
        speed_up, promised = statistics.median(ratios), costs[0] / costs[delta]
        report.add(
            {
                f"{name}_images_per_second": round(setting.batch / statistics.median(timed.seconds), 2),
                f"{name}_speed_up_ratio": round(speed_up, 3),
                f"{name}_multiplications_ratio": round(promised, 3),
                f"{name}_merging_share": round(timed.merging_share, 4),
            }
        )
        if timed.peak_mebibytes is not None:
            report.add({f"{name}_peak_mebibytes": round(timed.peak_mebibytes, 1)})
        if delta and min_share is not None:
            share = speed_up / promised
            report.hold(f"{name}: speed-up over ratio of multiplications", share, ">=", min_share)


def settings(options: argparse.Namespace) -> list[Setting]:
    """What is timed: ViT-B/16 at batch 8 and 32, and the small trained transformer where its weights are."""
    device = torch.device(options.device)
    base = random_checkpoint(SHAPES["base"], 1).transformer.to(device)
    found = [Setting("base", base, batch, BASE_DELTAS, options.rounds) for batch in (8, 32)]
    if options.small.is_file():
        small = load(options.small).transformer.to(device)
        found += [Setting("small", small, batch, SMALL_DELTAS, 8 * options.rounds) for batch in (8, 32)]
    return found


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
