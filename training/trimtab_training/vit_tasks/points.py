"""Operating points of the small transformer, and the temperatures that calibrate the confidences of any points."""

from collections.abc import Callable, Iterable
from typing import Final

from trimtab_model_servers.transformer.checkpoints import Checkpoint
from trimtab_model_servers.transformer.tasks import prompt_variant
from trimtab_pipelines.operating_point import OperatingPoint, TokenMerging
from trimtab_training.confidence_fitting import best_temperature
from trimtab_training.task_training import task_logits
from trimtab_training.vit_tasks.datasets import MAX_PER_TASK, SEED, TASKS

Temperatures = dict[str, dict[str, float]]
GUIDED: Final = (8, 10)
"""Merged tokens per layer of the points with the rule `guided`; 10 of 64 patches leave two."""


def merging(count: int, rule: str | None = None) -> OperatingPoint:
    """A point that merges `count` tokens in each layer, without an accuracy."""
    name = f"merge-{count}" + (f"-{rule}" if rule else "")
    return OperatingPoint(name=name, merging=TokenMerging(schedule=(count,), rule=rule), accuracy=0)


FULL: Final = OperatingPoint(name="full", accuracy=0)
POINTS: Final = (FULL, merging(4), merging(6), *(merging(count, "guided") for count in GUIDED))
"""Served points."""


def fit_temperatures(
    checkpoint: Checkpoint, points: Iterable[OperatingPoint], advance: Callable[[str], None]
) -> Temperatures:
    """Fit one temperature for each point and task to all held-out images (Guo et al. 2017)."""
    held_out = {task: draw("held-out", MAX_PER_TASK, SEED) for task, draw in TASKS.items()}
    temperatures: Temperatures = {}
    for point in points:
        temperatures[prompt_variant(point)] = {
            task: best_temperature(task_logits(checkpoint, point, task, images.pixels), images.labels)
            for task, images in held_out.items()
        }
        advance(point.name)
    return temperatures
