"""From answers of whole pipelines to accuracies of single variants. Pure.

A pipeline of one stage: the share of right answers. Of several: the planner multiplies the stages' accuracies, so they
are written such that the product is what was measured. With the best variants everywhere (share A of N stages) each has
the N-th root of A; another variant in one stage, the rest the best, gives share E, and the variant E/A of that root.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from trimtab_loadtester.payloads.interface import Score
from trimtab_pipelines.accuracy_evidence import Accuracy, mean_confidence, wilson_interval
from trimtab_pipelines.errors import UserError
from trimtab_pipelines.spec import InferencePipeline

Choice = tuple[tuple[str, str], ...]
"""Variant and operating point of each stage, in the pipeline's order."""
PointKey = tuple[str, str, str]
"""Stage, variant and operating point."""
DIGITS = 4


class NoCorrectAnswers(UserError):
    """Not one answer was right, so that nothing can be told of single variants."""


@dataclass(frozen=True, slots=True)
class ReceivedAnswer:
    """What came of one sample: its score, and how certain each stage said it is, row by row, parted by commas.

    `task`: of the sample; empty where nobody says.
    """

    score: Score
    confidences: Mapping[str, str] = field(default_factory=dict)
    task: str = ""


@dataclass(frozen=True, slots=True)
class Tally:
    """What came of all samples with one choice: answers that count, those that were right, and samples."""

    correct: float
    total: float
    effective: float
    """Independent answers that would tell as much: answers about one sample are right or wrong together."""
    samples: int

    @classmethod
    def of(cls, scores: Sequence[Score]) -> "Tally":
        """Sum up; each score is of one sample."""
        correct, total = sum(score.correct for score in scores), sum(score.total for score in scores)
        return cls(correct, total, _effective(scores, correct, total), len(scores))

    @property
    def share(self) -> float:
        """Right answers among those that count."""
        return self.correct / self.total if self.total else math.nan


def _effective(scores: Sequence[Score], correct: int, total: int) -> float:
    """Answers by the variance of a ratio of sums over samples (Cochran, Sampling Techniques, 1977, section 6.3)."""
    n = len(scores)
    if n < 2 or not 0 < correct < total:
        return float(min(n, total))
    share = correct / total
    residual = math.fsum((score.correct - share * score.total) ** 2 for score in scores)
    variance = residual / total**2
    return min(share * (1 - share) / variance, float(total)) if variance > 0 else float(total)


def choices(pipeline: InferencePipeline) -> list[Choice]:
    """Return the best choice, by what the pipeline declares, and each that differs from it in one stage."""
    stages = pipeline.spec.ordered_stages
    listed = [
        [(variant.name, point.name) for variant in stage.variants for point in variant.points] for stage in stages
    ]
    best = tuple(
        max(
            ((variant.name, point.name, point.accuracy) for variant in stage.variants for point in variant.points),
            key=lambda named: named[2],
        )[:2]
        for stage in stages
    )
    others = [
        (*best[:place], option, *best[place + 1 :])
        for place, options in enumerate(listed)
        for option in options
        if option != best[place]
    ]
    return [best, *others]


def mean_confidences(heard: Sequence[ReceivedAnswer], told_apart: Collection[str] = ()) -> dict[str, float]:
    """Map a stage to how certain it was of all rows, as a mean, where one can be told (`mean_confidence`).

    Args:
        heard: what came of samples.
        told_apart: stages whose accuracies are told by task.
    """
    found = {}
    for stage in {stage for one in heard for stage in one.confidences}:
        told = [float(part or "nan") for one in heard for part in one.confidences.get(stage, "").split(",")]
        mean = mean_confidence(told, [one.task for one in heard] if stage in told_apart else ())
        if mean is not None:
            found[stage] = mean
    return found


def scale_factor(whole: float, stages: int) -> float | None:
    """What the share with a choice is multiplied by to be the accuracy of a variant, where the best have `whole`.

    None where that cannot be told: of several stages none was ever right.
    """
    if stages == 1:
        return 1.0
    return whole ** (1 / stages) / whole if whole > 0 else None


def accuracies(
    pipeline: InferencePipeline,
    tallies: Mapping[Choice, Tally],
    samples_digest: str,
    confidences: Mapping[Choice, Mapping[str, float]],
) -> dict[PointKey, Accuracy]:
    """Map (stage, variant, operating point) to its measured accuracy.

    Args:
        pipeline: that was measured.
        tallies: what came of the samples.
        samples_digest: of the samples.
        confidences: how certain each stage was with a choice, as a mean.

    Raises:
        NoCorrectAnswers: no sample was answered rightly with the best variants.
    """
    best = choices(pipeline)[0]
    whole = tallies[best].share
    by = scale_factor(whole, len(best))
    if by is None or not whole > 0:
        raise NoCorrectAnswers(
            "not one sample was answered rightly with the best variants: do the samples' outputs have the right names?"
        )
    return attribute(pipeline, tallies, by, samples_digest, confidences)


def attribute(
    pipeline: InferencePipeline,
    tallies: Mapping[Choice, Tally],
    by: float,
    samples_digest: str,
    confidences: Mapping[Choice, Mapping[str, float]],
) -> dict[PointKey, Accuracy]:
    """Give each choice's share, times a factor, to the variants by which it differs from the best.

    Args:
        pipeline: that was measured.
        tallies: what came of the samples.
        by: the factor (`factor`).
        samples_digest: of the samples.
        confidences: how certain each stage was with a choice, as a mean.
    """
    best = choices(pipeline)[0]
    found = {}
    for choice, tally in tallies.items():
        for stage, mine, reference in zip(pipeline.spec.ordered_stages, choice, best, strict=True):
            if mine != reference or choice == best:
                judged = _accuracy(tally, by, samples_digest)
                mean = confidences.get(choice, {}).get(stage.name)
                found[stage.name, *mine] = judged.model_copy(update={"mean_confidence": mean})
    return found


def _accuracy(tally: Tally, by: float, samples_digest: str) -> Accuracy:
    low, high = wilson_interval(tally.share * tally.effective, tally.effective)
    value, low, high = (round(min(1.0, by * figure), DIGITS) for figure in (tally.share, low, high))
    return Accuracy(
        value=value,
        source="Measured",
        samples=tally.samples,
        low=min(low, value),
        high=max(high, value),
        samples_digest=samples_digest,
    )
