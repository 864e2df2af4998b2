"""Accuracies by task, for samples that name their tasks.

They are determined for the stage of a pipeline of one stage, and for stages whose models receive the task of each row.
"""

from collections.abc import Mapping, Sequence

from trimtab.accuracy.attribution import (
    Choice,
    PointKey,
    ReceivedAnswer,
    Tally,
    attribute,
    choices,
    mean_confidences,
    scale_factor,
)
from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.tasks import TASK_INPUT


def task_accuracy_stages(pipeline: InferencePipeline) -> frozenset[str]:
    """Return the stages with accuracies by task."""
    stages = pipeline.spec.stages
    if len(stages) == 1:
        return frozenset({stages[0].name})
    return frozenset(stage.name for stage in stages if any(read.name == TASK_INPUT for read in stage.inputs))


def task_accuracies(
    pipeline: InferencePipeline,
    answers: Mapping[Choice, Sequence[ReceivedAnswer]],
    tasks: Sequence[str],
    samples_digest: str,
) -> dict[PointKey, dict[str, Accuracy]]:
    """Map points to their measured accuracy by task.

    A task without a correct answer is excluded in a pipeline of several stages, since it cannot be attributed.
    """
    best, stages = choices(pipeline)[0], task_accuracy_stages(pipeline)
    by_point: dict[PointKey, dict[str, Accuracy]] = {}
    for task in tasks:
        of_task = {choice: [answer for answer in listed if answer.task == task] for choice, listed in answers.items()}
        tallies = {choice: Tally.of([answer.score for answer in listed]) for choice, listed in of_task.items()}
        factor = scale_factor(tallies[best].share, len(best))
        if factor is None:
            continue
        confidences = {choice: mean_confidences(listed) for choice, listed in of_task.items()}
        for point, accuracy in attribute(pipeline, tallies, factor, samples_digest, confidences).items():
            if point[0] in stages:
                by_point.setdefault(point, {})[task] = accuracy
    return by_point
