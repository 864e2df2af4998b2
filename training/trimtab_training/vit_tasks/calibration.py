"""Calibration of operating points: one temperature per point and task, and escalation thresholds.

Stored temperatures are fitted to all held-out images (Guo et al. 2017). Reported confidences use temperatures that are
fitted to the other half of the images.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab_model_servers.transformer.tasks import prompt_variant
from trimtab_pipelines.documents import write_atomically
from trimtab_pipelines.escalation import Escalation
from trimtab_pipelines.escalation_thresholds import ConfidenceSample, measure_escalations
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.yaml_edit import with_escalations
from trimtab_training.confidence_fitting import best_temperature, calibration_error
from trimtab_training.vit_tasks.evaluate import ByTask, ScoredImages

STAGE = "classify"
_HALVES_SEED = 17
Temperatures = dict[str, dict[str, float]]
Escalations = Mapping[str, Sequence[Escalation]]
Confidence = NDArray[np.floating[Any]]


def fit_temperatures(scored: Mapping[str, ByTask], points: Sequence[OperatingPoint]) -> Temperatures:
    return {
        prompt_variant(point): {
            task: best_temperature(images.logits, images.labels) for task, images in scored[point.name].items()
        }
        for point in points
    }


def confidence_sample(by_task: ByTask) -> ConfidenceSample:
    """Confidence and correctness of all tasks' images, with the temperature of the other half."""
    tasks = np.repeat(list(by_task), [len(images.labels) for images in by_task.values()])
    confidences = np.concatenate([_cross_fitted_confidence(images) for images in by_task.values()])
    correct = np.concatenate([images.correct for images in by_task.values()])
    return ConfidenceSample(confidences, correct, tasks=tasks)


def _cross_fitted_confidence(images: ScoredImages) -> Confidence:
    confidences = torch.empty(len(images.labels))
    for half, other in random_halves(len(images.labels)):
        temperature = best_temperature(images.logits[other], images.labels[other])
        confidences[half] = (images.logits[half] / temperature).softmax(dim=1).amax(dim=1)
    result: Confidence = confidences.numpy()
    return result


def random_halves(count: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Random halves, since images alternate by label."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(_HALVES_SEED))
    first, second = order[: count // 2], order[count // 2 :]
    return (first, second), (second, first)


def confidence_report(scored: Mapping[str, ByTask], points: Sequence[OperatingPoint]) -> dict[str, Any]:
    """Calibration errors of the points, as `accuracy.json` holds them.

    The error is the expected calibration error over all images. The bias of a task is its mean confidence less its
    accuracy, which a router would report as drift.
    """
    return {point.name: _calibration_errors(scored[point.name]) for point in points}


def _calibration_errors(by_task: ByTask) -> dict[str, Any]:
    confidences = {task: _cross_fitted_confidence(images) for task, images in by_task.items()}
    correct = np.concatenate([images.correct for images in by_task.values()])
    return {
        "error": round(calibration_error(np.concatenate(list(confidences.values())), correct), 4),
        "bias": {
            task: round(float(confidences[task].mean() - images.correct.mean()), 4) for task, images in by_task.items()
        },
    }


def escalations(scored: Mapping[str, ByTask], points: Sequence[OperatingPoint]) -> Escalations:
    """Escalations from each point over all tasks, with thresholds by task."""
    return measure_escalations({point.name: confidence_sample(scored[point.name]) for point in points})


def write_escalations(pipeline: Path, variant: str, by_point: Escalations) -> None:
    """Write escalations into a pipeline file, if it exists."""
    if pipeline.exists():
        by_key = {(STAGE, variant, point): listed for point, listed in by_point.items()}
        write_atomically(pipeline, with_escalations(pipeline.read_text(encoding="utf-8"), by_key))
