"""From answers at each operating point to what looking again at the least certain is worth. Pure.

It is told of stages that say how certain they are, in pipelines of one stage and samples of one row: where several
stages or rows make one answer, it is not known whose confidence was right. Samples that tell their tasks get thresholds
by task.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from trimtab.accuracy.attribution import Choice, ReceivedAnswer
from trimtab_pipelines import confidence
from trimtab_pipelines.confidence import ConfidenceSample
from trimtab_pipelines.escalation import Escalation
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Stage


def escalations(
    pipeline: InferencePipeline, heard: Mapping[Choice, Sequence[ReceivedAnswer]]
) -> dict[tuple[str, str, str], tuple[Escalation, ...]]:
    """Map (stage, variant, operating point) to its second looks, none among them; empty where they cannot be told."""
    (stage, *others) = pipeline.spec.stages
    if others or stage.confidence is None:
        return {}
    found: dict[tuple[str, str, str], tuple[Escalation, ...]] = {}
    for variant in stage.variants:
        seen = {
            point.name: _seen(stage, heard[(variant.name, point.name),], frozenset(point.modalities))
            for point in variant.points
        }
        known = {name: one for name, one in seen.items() if one is not None}
        if len(known) == len(seen) > 1:
            found |= {(stage.name, variant.name, name): told for name, told in confidence.escalations(known).items()}
    return found


def _seen(stage: Stage, heard: Sequence[ReceivedAnswer], reads: frozenset[str]) -> ConfidenceSample | None:
    """The samples as one point sees them; None where a sample is not one answer with one confidence."""
    told = [one.confidences.get(stage.name, "").split(",") for one in heard]
    if any(one.score.total != 1 for one in heard) or any(len(one) != 1 or not one[0] for one in told):
        return None
    confidence = np.array([float(one[0]) for one in told])
    tasks = np.array([one.task for one in heard])
    right = np.array([one.score.correct == 1 for one in heard])
    return ConfidenceSample(confidence, right, reads, tasks if np.all(tasks != "") else None)
