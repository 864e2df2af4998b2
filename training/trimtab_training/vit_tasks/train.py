"""Training of the vit-tasks pipeline's small transformer: `python -m trimtab_training.vit_tasks.train -o DIR`.

Writes `DIR/weights/vit-tasks.safetensors`. Seeds are fixed. The transformer is trained on crops and frozen; then every
other task gets a head, and every point and task a temperature. `trimtab evaluate` measures the points.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trimtab_model_servers.transformer.checkpoints import Checkpoint, load, save, store_temperatures
from trimtab_model_servers.transformer.config import ViTConfig, preprocess
from trimtab_model_servers.transformer.tasks import PLAIN, Head
from trimtab_model_servers.transformer.transformer import ForwardPlan, VisionTransformer
from trimtab_training.task_training import LabelledImages, fit_prompts
from trimtab_training.trainer import Advance, Schedule, argument_parser, loss_bar, minimize, training_progress
from trimtab_training.vit_tasks.datasets import CLASSES, SIDE_PX, TASKS
from trimtab_training.vit_tasks.points import POINTS, fit_temperatures

SHAPE: Final = ViTConfig(side=SIDE_PX, patch=4, channels=1, width=64, depth=8, heads=2, inner=256)
TRANSFORMER: Final = Schedule(steps=1200, batch=128, peak_rate=1.5e-3, seed=3)
HEADS: Final = Schedule(steps=600, batch=256, peak_rate=1e-2, seed=5)
TRAINING_IMAGES: Final = {"crops": 40_000, "digits": 4_000, "turned": 4_000, "faces": 1_000}
TRAINING_SEED: Final = 1
PRETRAINING_TASK: Final = "crops"
WEIGHTS: Final = "weights/vit-tasks.safetensors"
TRANSFORMER_WEIGHT_DECAY: Final = 0.05


def init_weights(transformer: VisionTransformer, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for module in transformer.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02, generator=random)
            nn.init.zeros_(module.bias)
    nn.init.trunc_normal_(transformer.pos_embed, std=0.02, generator=random)
    nn.init.trunc_normal_(transformer.cls_token, std=0.02, generator=random)


def fit_transformer(
    transformer: VisionTransformer,
    images: LabelledImages,
    classes: int,
    schedule: Schedule,
    advance: Advance,
    initial: Head | None = None,
) -> Head:
    """Train a transformer with a head on one task, from an initial head or a new one; return the head."""
    random = torch.Generator().manual_seed(schedule.seed)
    head = nn.Linear(transformer.shape.width, classes)
    if initial is not None:
        head.load_state_dict({"weight": initial.weight, "bias": initial.bias})

    def loss() -> Tensor:
        indices = torch.randint(len(images), (schedule.batch,), generator=random)
        features = transformer(preprocess(images.pixels[indices], "Image"))
        return cross_entropy(head(features), images.labels[indices], label_smoothing=0.1)

    parameters = [*transformer.parameters(), *head.parameters()]
    groups: list[dict[str, Any]] = [
        {"params": [weight for weight in parameters if weight.dim() == 2], "weight_decay": TRANSFORMER_WEIGHT_DECAY},
        {"params": [weight for weight in parameters if weight.dim() != 2], "weight_decay": 0.0},
    ]
    minimize(groups, loss, schedule, advance=advance)
    return Head(head.weight.detach(), head.bias.detach())


def fit_head(transformer: VisionTransformer, images: LabelledImages, classes: int, schedule: Schedule) -> Head:
    """Train the head of one task on the features of a frozen transformer."""
    initial = Head(torch.zeros(classes, transformer.shape.width), torch.zeros(classes))
    return fit_prompts(transformer, images, "Image", ForwardPlan(), initial=initial, count=0, schedule=schedule)


def train_transformer(advance: Advance) -> tuple[VisionTransformer, Head]:
    """Train the transformer and its head on the crops."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TRANSFORMER.seed)
        transformer = VisionTransformer(SHAPE)
        init_weights(transformer, TRANSFORMER.seed)
        classes = len(CLASSES[PRETRAINING_TASK])
        head = fit_transformer(transformer, training_images(PRETRAINING_TASK), classes, TRANSFORMER, advance)
    return transformer.eval().requires_grad_(requires_grad=False), head


def add_heads(transformer: VisionTransformer, head: Head, advance: Callable[[str], None]) -> Checkpoint:
    """Train the heads of the other tasks on the frozen transformer."""
    heads = {PRETRAINING_TASK: head}
    for task in TASKS:
        if task != PRETRAINING_TASK:
            heads[task] = fit_head(transformer, training_images(task), len(CLASSES[task]), HEADS)
        advance(task)
    return Checkpoint(transformer, {PLAIN: {task: heads[task] for task in TASKS}}, CLASSES, "Image")


def training_images(task: str) -> LabelledImages:
    return TASKS[task]("train", TRAINING_IMAGES[task], TRAINING_SEED)


def note_bar(progress: Progress, name: str, total: int) -> Callable[[str], None]:
    """Add a bar that advances with each note."""
    bar = progress.add_task(name, total=total, note="")
    return lambda note: progress.update(bar, advance=1, note=note)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, unless `--calibrate-only` is set, and calibrate."""
    parser = argument_parser("Train the small vision transformer.")
    parser.add_argument("--calibrate-only", action="store_true", help="calibrate existing weights without training")
    options = parser.parse_args(arguments)
    path = options.output / WEIGHTS
    path.parent.mkdir(parents=True, exist_ok=True)
    with training_progress(options.threads) as progress:
        if not options.calibrate_only:
            _train(path, progress)
        advance = note_bar(progress, "temperatures", len(POINTS))
        store_temperatures(path, fit_temperatures(load(path), POINTS, advance))
    return 0


def _train(path: Path, progress: Progress) -> None:
    started = time.perf_counter()
    transformer, head = train_transformer(loss_bar(progress, "transformer", TRANSFORMER.steps))
    seconds = f"{time.perf_counter() - started:.0f}"
    checkpoint = add_heads(transformer, head, note_bar(progress, "heads", len(TASKS)))
    save(checkpoint, path, {"seed": str(TRANSFORMER.seed), "training_seconds": seconds})


if __name__ == "__main__":
    sys.exit(main())
