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
from trimtab_router.scheduling.accuracy_observations import FORGET_SECONDS, MIN_ROWS, Observations
from trimtab_router.scheduling.broken_inputs import AccuracyEstimate, lower_estimates, suspect_inputs
from trimtab_router.scheduling.service_time import Key

CALIBRATION_TOLERANCE = 0.03  # mean confidence less accuracy of points whose confidences may be compared


@dataclass(frozen=True, slots=True)
class _Measured:
    """Profiled accuracy and mean confidence of a point, for one task or all."""

    accuracy: float
    confidence: float
    samples: int

    @property
    def calibrated(self) -> bool:
        return abs(self.accuracy - self.confidence) <= CALIBRATION_TOLERANCE


@dataclass(frozen=True, slots=True)
class AccuracyBaseline:
    """The first pass of escalated rows, with which their second is compared."""

    point: Key
    confidences: Array
    """Shape [rows]."""
    expected_gain: float
    """Profiled gain of accuracy by the escalation."""


class AccuracyMonitor:
    """Monitor of the points of one stage, for all rows and for the tasks with profiled accuracies."""

    def __init__(self, stage: Stage) -> None:
        self.enabled = True
        self._measured = _measured(stage)
        self._accuracies = {(v.name, p.name, ""): p.accuracy for v in stage.variants for p in v.points}
        self._accuracies |= {key_and_task: accuracy.accuracy for key_and_task, accuracy in self._measured.items()}
        self._suspected_inputs: dict[str, frozenset[str]] = defaultdict(frozenset)  # by variant
        self._inputs_by_point = {v.name: _inputs_by_point(v, stage) for v in stage.variants}
        self._by_task = {(v.name, p.name) for v in stage.variants for p in v.points if p.accuracy_by_task}
        self._registered: dict[tuple[str, str], Mapping[str, Accuracy]] = {}
        self._observations: dict[tuple[str, str, str], Observations] = {}
        self.shadow_rows: dict[Key, int] = defaultdict(int)  # rows that also ran at the best point

    def register_task(self, variant: str, task: str, accuracies: Mapping[str, Accuracy]) -> None:
        if self._registered.get((variant, task)) == accuracies:
            return
        self.unregister_task(variant, task)
        self._registered[variant, task] = accuracies
        for point, accuracy in accuracies.items():
            self._accuracies[variant, point, task] = accuracy.value
            if (baseline := _baseline_of(accuracy)) is not None:
                self._measured[variant, point, task] = baseline

    def unregister_task(self, variant: str, task: str) -> None:
        for point in self._registered.pop((variant, task), {}):
            for valid in (self._accuracies, self._measured, self._observations):
                valid.pop((variant, point, task), None)

    def has_baseline(self, key: Key, task: str) -> bool:
        """Return whether a profiled mean confidence exists for rows of a task, or for all rows if `task` is empty."""
        return self._measured_of(key, task) is not None

    def observe(
        self, key: Key, task: str, confidences: Array, now: float, *, weight: float = 1.0, shift: float = 0.0
    ) -> None:
        """Add first-pass rows of this weight each. Confidences outside 0 … 1 are ignored.

        `shift`: how much the variants of earlier stages are expected to change their confidence.
        """
        measured = self._measured_of(key, task) if self.enabled else None
        if measured is None:
            return
        expected = measured.confidence + shift
        changes = [value - expected for value in confidences.tolist() if 0.0 <= value <= 1.0]
        if changes:
            for observations in self._observations_of(key, task, now):
                observations.add(changes, weight, shift)

    def observe_escalated(
        self, key: Key, task: str, confidences: Array, before: AccuracyBaseline, now: float, *, weight: float = 1.0
    ) -> None:
        both = (self._measured_of(key, task), self._measured_of(before.point, task))
        values, first_confidences = (np.asarray(array, dtype=np.float64) for array in (confidences, before.confidences))
        valid = _valid(values) & _valid(first_confidences)
        if (
            not self.enabled
            or not valid.any()
            or not all(accuracy is not None and accuracy.calibrated for accuracy in both)
        ):
            return
        for observations in self._observations_of(key, task, now):
            gain = float((values - first_confidences)[valid].sum()) - int(valid.sum()) * before.expected_gain
            observations.add_escalated(weight * gain, weight * int(valid.sum()))

    def observe_shadow(
        self,
        key: Key,
        best_point: Key,
        task: str,
        confidence: float,
        best_confidence: float,
        *,
        agrees: bool,
        shift: float = 0.0,
    ) -> None:
        """Add a row that also ran at the best point, whose response is the better estimate of the correct one."""
        own, best = self._measured_of(key, task), self._measured_of(best_point, task)
        if own is None or best is None or not (0.0 <= confidence <= 1.0 and 0.0 <= best_confidence <= 1.0):
            return
        claimed = confidence - shift - own.confidence + own.accuracy
        best_claimed = min(max(best_confidence - shift - best.confidence + best.accuracy, 0.0), 1.0)
        expected = best_claimed if agrees else (1.0 - best_claimed) * min(max(claimed, 0.0), 1.0)
        for key_and_task in self._keys(key, task):
            if observations := self._observations.get(key_and_task):
                observations.shadow_correction.add(expected - claimed, 1.0)
        self.shadow_rows[key] += 1

    def drifted_accuracies(self, now: float) -> dict[tuple[str, str, str], float]:
        """Return the accuracies of points and tasks (empty: all rows) that are no longer as profiled.

        Tasks of a drifted point that were observed unchanged are listed with their profiled accuracy; all others drift
        with the point. Points that read a broken input are listed until observations confirm them.
        """
        self._observations = {
            key_and_task: observations
            for key_and_task, observations in self._observations.items()
            if now - observations.seen_at < FORGET_SECONDS
        }
        changes = {key_and_task: observations.change() for key_and_task, observations in self._observations.items()}
        for key_and_task, change in changes.items():
            unchanged = change is None and changes.get((*key_and_task[:2], "")) is not None
            if unchanged and key_and_task[2] and self._observations[key_and_task].rows >= MIN_ROWS:
                changes[key_and_task] = 0.0
        drifted = {
            key_and_task: min(max(self._accuracies[key_and_task] + change, 0.0), 1.0)
            for key_and_task, change in changes.items()
            if change is not None
        }
        for variant, inputs_by_point in self._inputs_by_point.items():
            estimates = self._estimates(variant, inputs_by_point, drifted, now)
            failing = self._suspected_inputs[variant] = suspect_inputs(estimates, self._suspected_inputs[variant])
            drifted |= {
                (variant, point, ""): accuracy for point, accuracy in lower_estimates(estimates, failing).items()
            }
        return drifted

    def _estimates(
        self,
        variant: str,
        inputs_by_point: Mapping[str, frozenset[str]],
        drifted: Mapping[tuple[str, str, str], float],
        now: float,
    ) -> list[AccuracyEstimate]:
        estimates: list[AccuracyEstimate] = []
        fall_times: list[float] = []
        for point, own in inputs_by_point.items():
            key_and_task = (variant, point, "")
            estimate = AccuracyEstimate(point, own, self._accuracies[key_and_task])
            if observations := self._observations.get(key_and_task):
                fell = drifted.get(key_and_task, estimate.measured) < estimate.measured
                observations.fell_at = (observations.fell_at or now) if fell else None
                estimate = replace(
                    estimate, observed_at=observations.seen_at, escalated_only=observations.change_by_rows() is None
                )
                if observations.fell_at is not None:
                    estimate = replace(estimate, observed=drifted[key_and_task])
                    fall_times.append(observations.fell_at)
            estimates.append(estimate)
        fell_at = min(fall_times, default=math.inf)
        return [replace(estimate, confirmed=self._is_confirmed(variant, estimate, fell_at)) for estimate in estimates]

    def _is_confirmed(self, variant: str, estimate: AccuracyEstimate, fell_at: float) -> bool:
        observations = self._observations.get((variant, estimate.point, ""))
        return observations is not None and estimate.observed is None and observations.is_newer_than(fell_at)

    def _measured_of(self, key: Key, task: str) -> _Measured | None:
        return self._measured.get((*key, self._task_key(key, task)))

    def _task_key(self, key: Key, task: str) -> str:
        return task if key in self._by_task or (key[0], task) in self._registered else ""

    def _keys(self, key: Key, task: str) -> list[tuple[str, str, str]]:
        counted_task = self._task_key(key, task)
        return [(*key, ""), (*key, counted_task)] if counted_task else [(*key, "")]

    def _observations_of(self, key: Key, task: str, now: float) -> list[Observations]:
        result = []
        for counted in self._keys(key, task):
            observations = self._observations.get(counted)
            if observations is None:
                measured = self._measured.get(counted)
                observations = self._observations[counted] = Observations(measured.samples if measured else 1)
            observations.seen_at = now
            result.append(observations)
        return result


def _inputs_by_point(variant: Variant, stage: Stage) -> dict[str, frozenset[str]]:
    """Return the inputs of each point; empty if all points read the same inputs."""
    every = frozenset(tensor.name for tensor in stage.inputs)
    carried = ((point.name, point.batch_inputs(stage.inputs)) for point in variant.points)
    inputs_by_point = {name: every if inputs is None else inputs for name, inputs in carried}
    return inputs_by_point if len(set(inputs_by_point.values())) > 1 else {}


def _measured(stage: Stage) -> dict[tuple[str, str, str], _Measured]:
    """Return the profiled accuracies with a mean confidence, by variant, point and task; the empty task is all rows."""
    measured = {}
    for variant in stage.variants:
        for point in variant.points:
            for task, accuracy in {"": point.measured_accuracy(), **point.accuracy_by_task}.items():
                if (baseline := _baseline_of(accuracy)) is not None:
                    measured[variant.name, point.name, task] = baseline
    return measured


def _baseline_of(accuracy: Accuracy) -> _Measured | None:
    if accuracy.source != "Measured" or accuracy.mean_confidence is None:
        return None
    return _Measured(accuracy.value, accuracy.mean_confidence, accuracy.samples or 1)


def _valid(confidences: NDArray[np.float64]) -> NDArray[np.bool_]:
    valid: NDArray[np.bool_] = (confidences >= 0.0) & (confidences <= 1.0)
    return valid
