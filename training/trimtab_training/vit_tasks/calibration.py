"""How certain each point is, made true by one temperature for point and task, and what looking again is worth.

A head says of itself 0.39 where it is right in 0.46 of the digits, and 0.51 where 56 merged tokens a layer leave 0.31.
So every point and task has its temperature (Guo et al. 2017), fitted to held-out images. What is told of confidence
here is of temperatures that were fitted to the other half of the images; those that are stored are fitted to all.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab_model_servers.transformer.prompt_selection import prompt_variant
from trimtab_pipelines import confidence
from trimtab_pipelines.confidence import ConfidenceSample
from trimtab_pipelines.documents import write_atomically
from trimtab_pipelines.escalation import Escalation
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.yaml_edit import with_escalations
from trimtab_training.confidence_fitting import best_temperature, calibration_error
from trimtab_training.vit_tasks.evaluate import ByTask, Scored

STAGE = "classify"
_HALVES_SEED = 17
Temperatures = dict[str, dict[str, float]]
Looks = Mapping[str, Sequence[Escalation]]
Confidence = NDArray[np.floating[Any]]


def temperatures(scored: Mapping[str, ByTask], points: Sequence[OperatingPoint]) -> Temperatures:
    """The best temperature by what a point does, then by task."""
    return {
        prompt_variant(point): {
            task: best_temperature(one.logits, one.labels) for task, one in scored[point.name].items()
        }
        for point in points
    }


def seen(by_task: ByTask) -> ConfidenceSample:
    """All tasks' images mixed, as one point sees them; each confidence by the temperature of the other half."""
    parts = [(_confidence(one), one.right) for one in by_task.values()]
    tasks = np.repeat(list(by_task), [len(one.labels) for one in by_task.values()])
    sure, right = (np.concatenate(listed) for listed in zip(*parts, strict=True))
    return ConfidenceSample(sure, right, tasks=tasks)


def _confidence(one: Scored) -> Confidence:
    found = torch.empty(len(one.labels))
    for own, other in _halves(len(one.labels)):
        found[own] = _surest(one.logits[own], best_temperature(one.logits[other], one.labels[other]))
    sure: Confidence = found.numpy()
    return sure


def _raw(one: Scored) -> Confidence:
    sure: Confidence = _surest(one.logits, 1.0).numpy()
    return sure


def _surest(logits: Tensor, temperature: float) -> Tensor:
    return (logits / temperature).softmax(dim=1).amax(dim=1)


def _halves(count: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Drawn once: images of one label stand at even places, or at odd ones."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(_HALVES_SEED))
    one, other = order[: count // 2], order[count // 2 :]
    return (one, other), (other, one)


def mean_confidence(scored: Mapping[str, ByTask], points: Sequence[OperatingPoint]) -> dict[str, Any]:
    """How far confidence is off, as ``accuracy.json`` holds it, with temperatures and without.

    The error is over all images (expected calibration error); the bias of each task is its mean confidence less its
    accuracy, which is what a router that watches accuracies would take for drift.
    """
    return {
        point.name: {"with": _off(scored[point.name], _confidence), "without": _off(scored[point.name], _raw)}
        for point in points
    }


def _off(by_task: ByTask, confidence_of: Callable[[Scored], Confidence]) -> dict[str, Any]:
    sure = {task: confidence_of(one) for task, one in by_task.items()}
    right = np.concatenate([one.right for one in by_task.values()])
    return {
        "error": round(calibration_error(np.concatenate(list(sure.values())), right), 4),
        "bias": {task: round(float(sure[task].mean() - one.right.mean()), 4) for task, one in by_task.items()},
    }


def escalations(scored: Mapping[str, ByTask], points: Sequence[OperatingPoint]) -> Looks:
    """What looking again is worth from each point, all tasks mixed, with thresholds by task."""
    return confidence.escalations({point.name: seen(scored[point.name]) for point in points})


def write_escalations(pipeline: Path, variant: str, found: Looks) -> None:
    """Put them into a pipeline where there is one."""
    if pipeline.exists():
        named = {(STAGE, variant, point): listed for point, listed in found.items()}
        write_atomically(pipeline, with_escalations(pipeline.read_text(encoding="utf-8"), named))
