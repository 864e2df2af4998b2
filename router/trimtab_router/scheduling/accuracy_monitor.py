"""`AccuracyMonitor`: detects accuracy drift of operating points from confidences and from shadow evaluations.

A point's mean confidence was measured with its accuracy, on the same samples. If its confidence in served rows has
changed since, its accuracy is taken to have changed by as much; a constant overconfidence, such as that of an
uncalibrated softmax, therefore has no effect. A point without a measured mean confidence is not monitored. Rows of
requests that name a task are compared with the measurements of that task, and count for the task and for the whole;
tasks may be registered at any time.

A small share of the rows also runs at the best point (shadow evaluation). The share that agrees corrects the estimate
from confidences (prediction-powered inference: Angelopoulos, Bates, Fannjiang, Jordan, Zrnic 2023). A point that serves
only escalated rows sees no representative sample: its confidence must exceed that of the first point by the measured
gain. Old rows decay, and a point that no longer serves rows is trusted again after a while, so that a repaired point
comes back into use.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.variants import Variant
from trimtab_protocol.tensors import Array
from trimtab_router.scheduling.input_faults import AccuracyEstimate, lower_estimates, suspect_inputs
from trimtab_router.scheduling.service_time import Key

KEPT_ROWS, KEPT_LOOKS, KEPT_AUDITS = 200.0, 100.0, 300.0
"""After so many more, what was seen counts a third."""
KEPT_SECONDS = 600.0
"""After so long without any row of a point, what was seen of it is forgotten."""
PRIOR_ROWS, PRIOR_AUDITS = 10.0, 200.0
"""How many rows count as having come as they were measured, and how many that agreed as often as said."""
LEAST_ROWS, LEAST_LOOKS = 100, 50
"""Before so many rows were seen, or seen again, nothing is said to have drifted."""
DRIFT, LOOK_DRIFT = 0.04, 0.1
"""By how much an accuracy must have changed to be told, at the least; of rows that were picked out a model's confidence
is right within five points or so, where it is within two of all rows;"""
SURENESS = 3.0
"""and how many standard errors of what was seen."""
CALIBRATED = 0.03
"""How far mean confidence may have been from accuracy where two points' confidences of the same rows are compared."""
_VARIANCES = (0.06, 0.12)
"""Of confidences, and of how far a single comparison is from what was said: as wide as they get."""


@dataclass(slots=True)
class _Mean:
    """A mean that forgets."""

    kept: float
    weight: float = 0.0
    total: float = 0.0

    def add(self, values: Array) -> None:
        self.forget(values.size)
        self.weight += values.size
        self.total += float(values.sum())

    def forget(self, rows: int) -> None:
        """So many rows came that say nothing here."""
        keep = float(np.exp(-rows / self.kept))
        self.weight *= keep
        self.total *= keep

    def value(self, prior: float, rows: float) -> float:
        return (self.total + rows * prior) / (self.weight + rows)


class _Seen:
    """By how much a point has changed: by rows it saw first, by rows it saw again, and by comparisons."""

    def __init__(self) -> None:
        self.rows = self.looks = 0
        self.seen_at = 0.0
        self.fell_at: float | None = None
        """Since when it is told as less accurate; None where it is not."""
        self.times = _Mean(KEPT_ROWS)
        self.confidence = _Mean(KEPT_ROWS)
        self.wins = _Mean(KEPT_LOOKS)
        self.mending = _Mean(KEPT_AUDITS)

    @property
    def change(self) -> float | None:
        """How much more often it is right than it was; None where that is nothing new."""
        by_rows = self.change_of_first_looks
        return by_rows if by_rows is not None else self._change_of_second_looks

    @property
    def change_of_first_looks(self) -> float | None:
        """The same by rows that it saw first."""
        change = self.confidence.value(0.0, PRIOR_ROWS) + self.mending.value(0.0, PRIOR_AUDITS)
        own, audits = (_VARIANCES[0], self.confidence, PRIOR_ROWS), (_VARIANCES[1], self.mending, PRIOR_AUDITS)
        told = self.rows >= LEAST_ROWS and abs(change) > max(DRIFT, SURENESS * _error(own, audits))
        return change if told else None

    @property
    def _change_of_second_looks(self) -> float | None:
        change = self.wins.value(0.0, PRIOR_ROWS)
        least = max(LOOK_DRIFT, SURENESS * _error((_VARIANCES[0], self.wins, PRIOR_ROWS)))
        return change if self.looks >= LEAST_LOOKS and abs(change) > least else None

    def is_newer_than(self, now: float) -> bool:
        """Whether enough was seen of it since then to tell whether it still holds."""
        return self.rows >= LEAST_ROWS and self.times.value(0.0, 0.0) > now


def _error(*parts: tuple[float, _Mean, float]) -> float:
    """The standard error of a sum of means, each with its variance and its prior, at most."""
    return math.sqrt(sum(variance * mean.weight / (mean.weight + prior) ** 2 for variance, mean, prior in parts))


@dataclass(frozen=True, slots=True)
class _Measured:
    """What was measured of a point, on a task or on all: how often it was right, and how certain."""

    accuracy: float
    confidence: float

    @property
    def calibrated(self) -> bool:
        return abs(self.accuracy - self.confidence) <= CALIBRATED


@dataclass(frozen=True, slots=True)
class AccuracyBaseline:
    """A first look at rows, to be held against their second."""

    point: str
    """Which point answered them."""
    confidences: Array
    """Of each row."""
    expected_gain: float
    """Right answers that such a second look wins a row, as it was measured."""


class AccuracyMonitor:
    """The points of a stage, overall and by the tasks that its document has accuracies of.

    Args:
        stage: the stage; what its document says was measured is what is held against.
    """

    def __init__(self, stage: Stage) -> None:
        self._measured = _measured(stage)
        self._accuracies = {(v.name, p.name, ""): p.accuracy for v in stage.variants for p in v.points}
        self._accuracies |= {which: one.accuracy for which, one in self._measured.items()}
        self._query_of_death: dict[str, frozenset[str]] = defaultdict(frozenset)
        """Inputs, by variant."""
        self._reads = {v.name: _reads(v, stage) for v in stage.variants}
        self._by_task = {(v.name, p.name) for v in stage.variants for p in v.points if p.accuracy_by_task}
        self._joined: dict[tuple[str, str], Mapping[str, Accuracy]] = {}
        self._seen: dict[tuple[str, str, str], _Seen] = {}
        self.shadow_rows: dict[Key, int] = defaultdict(int)
        """Rows that the best point answered too."""

    def register_task(self, variant: str, task: str, judged: Mapping[str, Accuracy]) -> None:
        """Tell rows of a task apart that joined a variant, and hold them against what was measured of it.

        Args:
            variant: which.
            task: its name; the document tells nothing of it at these points.
            judged: how accurate operating points are on it, where that is known.
        """
        if self._joined.get((variant, task)) == judged:
            return
        self.unregister_task(variant, task)
        self._joined[variant, task] = judged
        for point, one in judged.items():
            self._accuracies[variant, point, task] = one.value
            if (against := _against(one)) is not None:
                self._measured[variant, point, task] = against

    def unregister_task(self, variant: str, task: str) -> None:
        """Forget a task that joined a variant, and what was seen of it."""
        for point in self._joined.pop((variant, task), {}):
            for known in (self._accuracies, self._measured, self._seen):
                known.pop((variant, point, task), None)

    def has_baseline(self, key: Key, task: str) -> bool:
        """Whether it was measured how certain a point is of rows of a task; of all rows where it is empty."""
        return self._measured_of(key, task) is not None

    def observe(self, key: Key, task: str, confidences: Array, now: float) -> None:
        """Rows were answered for the first time.

        Args:
            key: by which variant at which point.
            task: of the rows; empty where nobody says.
            confidences: of each row; what is no probability says nothing.
            now: seconds.
        """
        measured, given = self._measured_of(key, task), np.asarray(confidences, dtype=np.float64)
        given = given[_told(given)]
        if measured is None or not given.size:
            return
        for seen in self._of(key, task, now):
            seen.rows += given.size
            seen.confidence.add(given - measured.confidence)
            seen.times.add(np.full(given.size, now))
            seen.wins.forget(given.size)

    def observe_escalated(self, key: Key, task: str, confidences: Array, before: AccuracyBaseline, now: float) -> None:
        """Rows that another point was not certain of were answered once more.

        Args:
            key: by which variant at which point.
            task: of the rows; empty where nobody says.
            confidences: of each row.
            before: their first look.
            now: seconds.
        """
        both = (self._measured_of(key, task), self._measured_of((key[0], before.point), task))
        given, first = (np.asarray(each, dtype=np.float64) for each in (confidences, before.confidences))
        known = _told(given) & _told(first)
        if not known.any() or not all(one is not None and one.calibrated for one in both):
            return
        for seen in self._of(key, task, now):
            seen.looks += int(known.sum())
            seen.wins.add((given - first)[known] - before.expected_gain)
            seen.confidence.forget(int(known.sum()))

    def observe_shadow(
        self, key: Key, best_point: str, task: str, confidence: float, best_confidence: float, *, agrees: bool
    ) -> None:
        """A row had an answer of the best point too, which is the better witness of what is right."""
        own, best = self._measured_of(key, task), self._measured_of((key[0], best_point), task)
        if own is None or best is None or not (0.0 <= confidence <= 1.0 and 0.0 <= best_confidence <= 1.0):
            return
        says = confidence - own.confidence + own.accuracy
        sure = min(max(best_confidence - best.confidence + best.accuracy, 0.0), 1.0)
        right = sure if agrees else (1.0 - sure) * min(max(says, 0.0), 1.0)
        for which in self._counting(key, task):
            if seen := self._seen.get(which):
                seen.mending.add(np.array([right - says]))
        self.shadow_rows[key] += 1

    def drifted_accuracies(self, now: float) -> dict[tuple[str, str, str], float]:
        """What is no longer as accurate as it was measured to be, and how accurate it is by now.

        Returns:
            By variant, operating point and task, which is empty for all rows together. Of a point that drifted, those
            of its tasks are told as measured that were seen to hold; the others are to be thought to drift along.
            Points that read an input which fails elsewhere are among them until they are seen to hold.
        """
        self._seen = {which: seen for which, seen in self._seen.items() if now - seen.seen_at < KEPT_SECONDS}
        changes = {which: seen.change for which, seen in self._seen.items()}
        for which, change in changes.items():
            held = change is None and changes.get((*which[:2], "")) is not None
            if held and which[2] and self._seen[which].rows >= LEAST_ROWS:
                changes[which] = 0.0
        told = {
            which: min(max(self._accuracies[which] + change, 0.0), 1.0)
            for which, change in changes.items()
            if change is not None
        }
        for variant, reads in self._reads.items():
            beliefs = self._beliefs(variant, reads, told, now)
            failing = self._query_of_death[variant] = suspect_inputs(beliefs, self._query_of_death[variant])
            told |= {(variant, point, ""): accuracy for point, accuracy in lower_estimates(beliefs, failing).items()}
        return told

    def _beliefs(
        self,
        variant: str,
        reads: Mapping[str, frozenset[str]],
        told: Mapping[tuple[str, str, str], float],
        now: float,
    ) -> list[AccuracyEstimate]:
        """What is known of a variant's points; those that fell are noted, and since when."""
        found: list[AccuracyEstimate] = []
        falls: list[float] = []
        for point, own in reads.items():
            which = (variant, point, "")
            belief = AccuracyEstimate(point, own, self._accuracies[which])
            if seen := self._seen.get(which):
                fell = told.get(which, belief.measured) < belief.measured
                seen.fell_at = (seen.fell_at or now) if fell else None
                belief = replace(belief, observed_at=seen.seen_at, escalated_only=seen.change_of_first_looks is None)
                if seen.fell_at is not None:
                    belief = replace(belief, observed=told[which])
                    falls.append(seen.fell_at)
            found.append(belief)
        return [replace(one, confirmed=self._held(variant, one, min(falls, default=math.inf))) for one in found]

    def _held(self, variant: str, belief: AccuracyEstimate, fell_at: float) -> bool:
        seen = self._seen.get((variant, belief.point, ""))
        return seen is not None and belief.observed is None and seen.is_newer_than(fell_at)

    def _measured_of(self, key: Key, task: str) -> _Measured | None:
        return self._measured.get((*key, self._told_apart(key, task)))

    def _told_apart(self, key: Key, task: str) -> str:
        """The task of rows where it is told apart: at this point, or since it joined; else they are rows like all."""
        return task if key in self._by_task or (key[0], task) in self._joined else ""

    def _counting(self, key: Key, task: str) -> list[tuple[str, str, str]]:
        """What rows count for: the point overall, and on their task where it tells tasks apart."""
        return [(*key, which) for which in sorted({"", self._told_apart(key, task)})]

    def _of(self, key: Key, task: str, now: float) -> list[_Seen]:
        """What is known of all that rows count for."""
        found = [self._seen.setdefault(which, _Seen()) for which in self._counting(key, task)]
        for seen in found:
            seen.seen_at = now
        return found


def _reads(variant: Variant, stage: Stage) -> dict[str, frozenset[str]]:
    """What each point of a variant reads; none where all read the same, so that nothing tells inputs apart."""
    every = frozenset(given.name for given in stage.inputs)
    carried = ((point.name, point.batch_inputs(stage.inputs)) for point in variant.points)
    found = {name: every if reads is None else reads for name, reads in carried}
    return found if len(set(found.values())) > 1 else {}


def _measured(stage: Stage) -> dict[tuple[str, str, str], _Measured]:
    """By variant, operating point and task, which is empty for all: only what was measured together with confidence."""
    found = {}
    for variant in stage.variants:
        for point in variant.points:
            for task, one in {"": point.measured_accuracy(), **point.accuracy_by_task}.items():
                if (against := _against(one)) is not None:
                    found[variant.name, point.name, task] = against
    return found


def _against(accuracy: Accuracy) -> _Measured | None:
    """What rows can be held against of an accuracy; None where it was not measured together with confidence."""
    if accuracy.source != "Measured" or accuracy.mean_confidence is None:
        return None
    return _Measured(accuracy.value, accuracy.mean_confidence)


def _told(confidences: NDArray[np.float64]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (confidences >= 0.0) & (confidences <= 1.0)
    return found
