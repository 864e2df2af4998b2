"""Pipeline accuracy: the product of the stages' accuracies (PAS) or the sum of their normalised ranks (PAS').

IPA, section 4.2: PAS multiplies accuracies; PAS' replaces each by its rank among the stage's accuracies, scaled to 0…1,
and adds them. PAS' is divided by the number of stages here, so that both lie between 0 and 1.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.spec import Objective
from trimtab_pipelines.stages import Stage


def pipeline_accuracy(stage_values: Iterable[float], metric: str) -> float:
    """Combine one value for each stage: accuracies for Product, normalised ranks for NormalizedRanks."""
    values = list(stage_values)
    return math.prod(values) if metric == "Product" else sum(values) / len(values)


def accuracy_sources(stages: Iterable[Stage]) -> str:
    """Sources of the accuracies of some stages, such as `declared` or `declared and measured`."""
    points = (point for stage in stages for variant in stage.variants for point in variant.points)
    return " and ".join(sorted({point.measured_accuracy().source_label for point in points}))


def normalised_ranks(accuracies: Sequence[float]) -> dict[float, float]:
    """Map each distinct accuracy to k/(V-1), where k is its rank from 0; a single accuracy has rank 1."""
    distinct = sorted(set(accuracies))
    if len(distinct) == 1:
        return {distinct[0]: 1.0}
    return {accuracy: rank / (len(distinct) - 1) for rank, accuracy in enumerate(distinct)}


def accuracy_values(stage: Stage, objective: Objective, accuracies: NDArray[np.float64]) -> NDArray[np.float64]:
    """A stage's accuracies as the values that the metric combines; ranks are interpolated between points."""
    if objective.accuracy_metric == "Product":
        return accuracies
    points = (point for variant in stage.variants for point in variant.points)
    ranks = normalised_ranks([point.accuracy_on(objective.accuracy_basis) for point in points])
    known, values = np.array(sorted(ranks.items())).T
    return np.asarray(np.interp(accuracies, known, values))
