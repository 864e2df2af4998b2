"""Attribution of a pipeline's accuracy to its variants, in total and by task, and the escalations between its points.

For one stage, a variant's accuracy is its share of correct answers. For several, the planner multiplies the accuracies
of the stages, so their product must equal the measured share. If the best variants of N stages reach the share A, each
has the accuracy A^(1/N). If another variant in one stage reaches the share E, its accuracy is E/A times that.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab_loadtester.payloads.interface import Outputs, Score
from trimtab_pipelines.accuracy_evidence import (
    MAX_CLASSES,
    Accuracy,
    AccuracySource,
    mean_confidence,
    wilson_interval,
)
from trimtab_pipelines.errors import UserError
from trimtab_pipelines.escalation import Escalation, Key
from trimtab_pipelines.escalation_evidence import ScoredRows, effective_samples, held_out_escalations
from trimtab_pipelines.escalation_pruning import undominated_escalations
from trimtab_pipelines.escalation_thresholds import measure_stage_escalations
from trimtab_pipelines.graph import REQUEST, row_domains
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.tasks import TASK_INPUT

Choice = tuple[tuple[str, str], ...]
"""Variant and operating point of each stage, in the pipeline's order."""
PointKey = tuple[str, str, str]
"""Stage, variant and operating point."""
DIGITS = 4


class NoCorrectAnswers(UserError):
    """No answer was correct, so accuracies cannot be attributed."""


@dataclass(frozen=True, slots=True)
class ReceivedAnswer:
    """Answer to one sample."""

    score: Score
    confidences: Mapping[str, str] = field(default_factory=dict)
    """By stage that got rows of the sample, the confidence of each row, separated by commas."""
    task: str = ""
    """Task of the sample, if it names one."""
    truth: Mapping[str, Any] = field(default_factory=dict)
    outputs: Outputs = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tally:
    """Results of all samples with one choice."""

    correct: float
    total: float
    effective: float
    """Equivalent number of independent answers: those to one sample are correlated."""
    samples: int
    bounds: tuple[float, float] | None = None
    """95 % interval of the share; None for the closed form of correct answers."""

    @classmethod
    def of(cls, scores: Sequence[Score]) -> "Tally":
        correct, total = sum(score.correct for score in scores), sum(score.total for score in scores)
        by_sample = np.array([(score.correct, score.total) for score in scores], dtype=np.int64).reshape(-1, 2)
        return cls(correct, total, effective_samples(*by_sample.T), len(scores))

    @property
    def share(self) -> float:
        return self.correct / self.total if self.total else math.nan


def choices(pipeline: InferencePipeline) -> list[Choice]:
    """Return the best choice by declared accuracies, and each choice that differs from it in one stage."""
    stages = pipeline.spec.ordered_stages
    options_by_stage = [
        [(variant.name, point.name) for variant in stage.variants for point in variant.points] for stage in stages
    ]
    best = tuple(
        max(
            ((variant.name, point.name, point.accuracy) for variant in stage.variants for point in variant.points),
            key=lambda entry: entry[2],
        )[:2]
        for stage in stages
    )
    others = [
        (*best[:index], option, *best[index + 1 :])
        for index, options in enumerate(options_by_stage)
        for option in options
        if option != best[index]
    ]
    return [best, *others]


def mean_confidences(answers: Sequence[ReceivedAnswer], by_task_stages: Collection[str] = ()) -> dict[str, float]:
    """Map stages to their mean confidence over all rows, or over those of a task where accuracies are by task."""
    means = {}
    for stage in {stage for answer in answers for stage in answer.confidences}:
        texts = [answer.confidences[stage] for answer in answers if stage in answer.confidences]
        rows = [float(row or "nan") for text in texts for row in text.split(",")]
        mean = mean_confidence(rows, [answer.task for answer in answers] if stage in by_task_stages else ())
        if mean is not None:
            means[stage] = mean
    return means


def scale_factor(best_share: float, stages: int) -> float | None:
    """Return the factor from a choice's share of correct answers to a variant's accuracy.

    None if the best choice of several stages has no correct answer.
    """
    if stages == 1:
        return 1.0
    return best_share ** (1 / stages) / best_share if best_share > 0 else None


def accuracies(
    pipeline: InferencePipeline,
    tallies: Mapping[Choice, Tally],
    samples_digest: str,
    confidences: Mapping[Choice, Mapping[str, float]],
    source: AccuracySource = "Measured",
) -> dict[PointKey, Accuracy]:
    """Map points to their measured accuracies. Raises NoCorrectAnswers if the best choice has no correct answer."""
    best = choices(pipeline)[0]
    factor = scale_factor(tallies[best].share, len(best))
    if factor is None or not tallies[best].share > 0:
        raise NoCorrectAnswers(
            "no sample was answered correctly with the best variants; check the names of the samples' outputs"
        )
    attributed = attribute(pipeline, tallies, factor, samples_digest, confidences)
    return {key: accuracy.replace(source=source) for key, accuracy in attributed.items()}


def attribute(
    pipeline: InferencePipeline,
    tallies: Mapping[Choice, Tally],
    factor: float,
    samples_digest: str,
    confidences: Mapping[Choice, Mapping[str, float]],
) -> dict[PointKey, Accuracy]:
    """Attribute each choice's share, times a factor, to the points by which it differs from the best choice.

    Mean confidences are by choice and stage.
    """
    best = choices(pipeline)[0]
    attributed = {}
    for choice, tally in tallies.items():
        for stage, point, reference in zip(pipeline.spec.ordered_stages, choice, best, strict=True):
            if point != reference or choice == best:
                means, usual = confidences.get(choice, {}), confidences.get(best, {})
                shifts = {name: round(means[name] - usual[name], DIGITS) for name in means.keys() & usual.keys()}
                evidence = {
                    "mean_confidence": means.get(stage.name),
                    "confidence_shifts": {
                        name: shifts[name] for name in sorted(shifts) if name != stage.name and shifts[name]
                    },
                }
                attributed[stage.name, *point] = _accuracy(tally, factor, samples_digest).replace(**evidence)
    return attributed


def output_shares(
    pipeline: InferencePipeline, answers: Mapping[Choice, Sequence[ReceivedAnswer]]
) -> dict[PointKey, dict[str, float]]:
    """Map points to the shares of their rows by class, if the pipeline outputs the class of a stage."""
    names, best = {output.source: output.name for output in pipeline.spec.outputs}, choices(pipeline)[0]
    found: dict[PointKey, dict[str, float]] = {}
    for choice, listed in answers.items():
        for stage, point, reference in zip(pipeline.spec.ordered_stages, choice, best, strict=True):
            name = names.get(f"{stage.name}.outputs.{stage.class_output}")
            given = [answer.outputs[name].ravel() for answer in listed if name is not None and name in answer.outputs]
            if stage.confidence is None or not given or (point == reference and choice != best):
                continue
            classes, counts = np.unique(np.concatenate(given), return_counts=True)
            if classes.size <= MAX_CLASSES:
                shares = (counts / counts.sum()).round(DIGITS).tolist()
                found[stage.name, *point] = dict(zip(map(str, classes.tolist()), shares, strict=True))
    return found


def _accuracy(tally: Tally, factor: float, samples_digest: str) -> Accuracy:
    low, high = tally.bounds or wilson_interval(tally.share * tally.effective, tally.effective)
    value, low, high = (round(min(1.0, factor * share), DIGITS) for share in (tally.share, low, high))
    return Accuracy(
        value=value,
        source="Measured",
        samples=tally.samples,
        low=min(low, value),
        high=max(high, value),
        samples_digest=samples_digest,
    )


def task_accuracy_stages(pipeline: InferencePipeline) -> frozenset[str]:
    """Return the only stage, else the stages whose models receive the task of each row."""
    stages = pipeline.spec.stages
    if len(stages) == 1:
        return frozenset({stages[0].name})
    return frozenset(stage.name for stage in stages if any(read.name == TASK_INPUT for read in stage.inputs))


def task_accuracies(
    pipeline: InferencePipeline,
    answers: Mapping[Choice, Sequence[ReceivedAnswer]],
    tasks: Sequence[str],
    samples_digest: str,
    tally: Callable[[Sequence[ReceivedAnswer]], Tally],
) -> dict[PointKey, dict[str, Accuracy]]:
    """Map points to their measured accuracy by task.

    A task without a correct answer is excluded in a pipeline of several stages, since it cannot be attributed.
    """
    best, stages = choices(pipeline)[0], task_accuracy_stages(pipeline)
    by_point: dict[PointKey, dict[str, Accuracy]] = {}
    for task in tasks:
        of_task = {choice: [answer for answer in listed if answer.task == task] for choice, listed in answers.items()}
        tallies = {choice: tally(listed) for choice, listed in of_task.items()}
        factor = scale_factor(tallies[best].share, len(best))
        if factor is None:
            continue
        confidences = {choice: mean_confidences(listed) for choice, listed in of_task.items()}
        for point, accuracy in attribute(pipeline, tallies, factor, samples_digest, confidences).items():
            if point[0] in stages:
                by_point.setdefault(point, {})[task] = accuracy
    return by_point


def escalations(
    pipeline: InferencePipeline,
    answers: Mapping[Choice, Sequence[ReceivedAnswer]],
    seconds: Mapping[PointKey, float] = MappingProxyType({}),
) -> dict[PointKey, tuple[Escalation, ...]]:
    """Map points to their escalations: the accuracy gained if a better point repeats its least confident rows.

    They are determined for stages with a confidence output that get one row of each sample, or whose rows are scored
    one by one: otherwise a wrong answer cannot be attributed to a confidence. Thresholds are chosen on every second
    sample, and their figures are those of the others. Samples of a single stage that name their tasks get thresholds by
    task, cross-fitted. In a pipeline of several stages, accuracies are attributed as those of variants are. `seconds`
    are those of a row at each point; empty if they are unknown.
    """
    best = choices(pipeline)[0]
    best_share = Tally.of([answer.score for answer in answers[best]]).share
    factor = scale_factor(best_share, len(best))
    tasks = np.array([answer.task for answer in answers[best]])
    by_task = tasks if len(best) == 1 and np.all(tasks != "") else None
    by_point: dict[PointKey, tuple[Escalation, ...]] = {}
    domains = row_domains(pipeline.spec.inputs, pipeline.spec.ordered_stages)
    for index, stage in enumerate(pipeline.spec.ordered_stages):
        keys = [(variant.name, point.name) for variant in stage.variants for point in variant.points]
        own_answers = {key: answers[*best[:index], key, *best[index + 1 :]] for key in keys}
        scores_are_of_rows = domains[stage.name] != REQUEST or {*domains.values()} == {REQUEST}
        scored = _scored_rows(stage, own_answers, scores_are_of_rows=scores_are_of_rows)
        if stage.confidence is None or factor is None or len(scored.rows) < 2:
            continue
        best_accuracy = scored.rows[best[index]].accuracy
        if not best_accuracy:
            continue
        costs = {key: seconds[stage.name, *key] for key in keys} if seconds else {}
        if by_task is not None and np.count_nonzero(scored.rows[best[index]].total) == by_task.size:
            samples = {key: replace(rows.sample(), tasks=by_task) for key, rows in scored.rows.items()}
            measured = measure_stage_escalations(samples)
            kept = undominated_escalations(measured, {key: own.accuracy for key, own in scored.rows.items()}, costs)
        else:
            kept = held_out_escalations(
                scored.rows,
                scored.samples % 2 == 0,
                costs,
                factor=factor * best_share / best_accuracy,
                serves_beside=partial(_serves_beside, stage),
            )
        by_point |= {(stage.name, *key): listed for key, listed in kept.items()}
    return by_point


def _serves_beside(stage: Stage, first: str, second: str) -> bool:
    """Whether low-confidence rows of the first variant may run again at the second."""
    return second == first or not stage.serves_one_variant


@dataclass(frozen=True, slots=True, eq=False)
class _StageRows:
    """Rows of a stage at each of its points."""

    rows: Mapping[Key, ScoredRows]
    """Empty if a wrong answer cannot be attributed to a row."""
    samples: NDArray[np.int64]
    """Number of the sample of each row. Shape (rows,)."""


def _scored_rows(
    stage: Stage, answers: Mapping[Key, Sequence[ReceivedAnswer]], *, scores_are_of_rows: bool
) -> _StageRows:
    """Combine the answers of each point of a stage: a row for each sample, or for each row that was scored."""
    parts = {
        key: [_rows_of(stage, answer, scores_are_of_rows=scores_are_of_rows) for answer in listed]
        for key, listed in answers.items()
    }
    sizes = {key: [-1 if part is None else part.total.size for part in listed] for key, listed in parts.items()}
    counts = next(iter(sizes.values()))
    if min(counts) < 0 or not sum(counts) or any(other != counts for other in sizes.values()):
        return _StageRows({}, np.empty(0, np.int64))
    rows = {
        key: replace(
            ScoredRows.concatenate([part for part in listed if part is not None]),
            inputs=frozenset(stage.variant(key[0]).point(key[1]).modalities),
        )
        for key, listed in parts.items()
    }
    return _StageRows(rows, np.repeat(np.arange(len(counts)), counts))


def _rows_of(stage: Stage, answer: ReceivedAnswer, *, scores_are_of_rows: bool) -> ScoredRows | None:
    """The rows of an answer, each with its score; None if there is neither one row nor a score of each row."""
    confidences = [float(text) for text in answer.confidences.get(stage.name, "").split(",") if text]
    score = answer.score
    if scores_are_of_rows and score.row_correct is not None and score.row_correct.size == len(confidences):
        labelled = np.ones(len(confidences), bool) if score.row_labelled is None else score.row_labelled
        correct = (score.row_correct & labelled).astype(np.int64)
        return ScoredRows(np.array(confidences), correct, labelled.astype(np.int64))
    if len(confidences) != 1 or not score.total:
        return None
    return ScoredRows(np.array(confidences), np.array([score.correct]), np.array([score.total]))
