"""From answers to samples that tell their tasks to accuracies on each of these. Pure.

They are told of the stage of a pipeline that has one, and of stages whose models are told which task each row is of:
they alone are known to do differently on different tasks.
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
    """The stages that have accuracies of single tasks."""
    stages = pipeline.spec.stages
    told = (stage.name for stage in stages if any(read.name == TASK_INPUT for read in stage.inputs))
    return frozenset(told) if len(stages) > 1 else frozenset({stages[0].name})


def task_accuracies(
    pipeline: InferencePipeline,
    heard: Mapping[Choice, Sequence[ReceivedAnswer]],
    tasks: Sequence[str],
    samples_digest: str,
) -> dict[PointKey, dict[str, Accuracy]]:
    """Map (stage, variant, operating point) to its measured accuracy on each task.

    Of several stages a task is left out that not one sample of was answered rightly: nobody knows by whose fault.
    """
    best, stages = choices(pipeline)[0], task_accuracy_stages(pipeline)
    found: dict[PointKey, dict[str, Accuracy]] = {}
    for task in tasks:
        own = {choice: [one for one in listed if one.task == task] for choice, listed in heard.items()}
        tallies = {choice: Tally.of([one.score for one in listed]) for choice, listed in own.items()}
        by = scale_factor(tallies[best].share, len(best))
        if by is None:
            continue
        confidences = {choice: mean_confidences(listed) for choice, listed in own.items()}
        for place, accuracy in attribute(pipeline, tallies, by, samples_digest, confidences).items():
            if place[0] in stages:
                found.setdefault(place, {})[task] = accuracy
    return found
