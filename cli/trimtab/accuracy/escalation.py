"""Escalations of a stage: accuracy gained if a more accurate point repeats its least confident rows.

They are determined for pipelines of one stage with a confidence output, and samples of one row: otherwise a wrong
answer cannot be attributed to a confidence. Samples that name their tasks get thresholds by task.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from trimtab.accuracy.attribution import Choice, PointKey, ReceivedAnswer
from trimtab_pipelines.escalation import Escalation
from trimtab_pipelines.escalation_thresholds import ConfidenceSample, measure_escalations
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Stage


def escalations(
    pipeline: InferencePipeline, answers: Mapping[Choice, Sequence[ReceivedAnswer]]
) -> dict[PointKey, tuple[Escalation, ...]]:
    """Map points to their escalations, possibly none; empty if they cannot be determined."""
    (stage, *others) = pipeline.spec.stages
    if others or stage.confidence is None:
        return {}
    by_point: dict[PointKey, tuple[Escalation, ...]] = {}
    for variant in stage.variants:
        samples = {}
        for point in variant.points:
            sample = _confidence_sample(stage, answers[(variant.name, point.name),], frozenset(point.modalities))
            if sample is not None:
                samples[point.name] = sample
        if len(samples) == len(variant.points) > 1:
            by_point |= {
                (stage.name, variant.name, name): listed for name, listed in measure_escalations(samples).items()
            }
    return by_point


def _confidence_sample(
    stage: Stage, answers: Sequence[ReceivedAnswer], modalities: frozenset[str]
) -> ConfidenceSample | None:
    """Combine the answers of a point; None if a sample has not exactly one answer with one confidence."""
    rows = [answer.confidences.get(stage.name, "").split(",") for answer in answers]
    if any(answer.score.total != 1 for answer in answers) or any(len(row) != 1 or not row[0] for row in rows):
        return None
    confidences = np.array([float(row[0]) for row in rows])
    tasks = np.array([answer.task for answer in answers])
    correct = np.array([answer.score.correct == 1 for answer in answers])
    return ConfidenceSample(confidences, correct, modalities, tasks if np.all(tasks != "") else None)
