"""`TokenOptions`: the options of a batch, which are every operating point and every escalation, with seconds and value.

All batches of a queue are evaluated at once, as matrices of batches by options.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf

import numpy as np

from trimtab_pipelines.row_splits import Floats, Integers
from trimtab_router.scheduling.policies.interface import Escalation, Point, SchedulerView
from trimtab_router.scheduling.policies.split_table import escalated_rows, profiled

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class TokenOption:
    """A way to serve a batch: at `point`; with an `escalation`, its low-confidence rows again at `escalation_point`."""

    point: Point
    escalation: Escalation | None = None
    escalation_point: Point | None = None

    @property
    def accuracy(self) -> float:
        """Expected over all tasks."""
        return self.point.accuracy if self.escalation is None else self.escalation.accuracy

    def accuracy_for(self, task: str) -> float:
        """Return the expected accuracy for a task; an escalation of all tasks adds the same to each."""
        if self.escalation is not None and self.escalation.by_task:
            rule = self.escalation.by_task.get(task)
            return self.point.accuracy_for(task) if rule is None else rule.accuracy
        added = self.escalation.accuracy - self.point.accuracy if self.escalation is not None else 0.0
        return min(self.point.accuracy_for(task) + added, 1.0)


class TokenOptions:
    """The options of a view.

    Args:
        view: the points and their current speed.
    """

    def __init__(self, view: SchedulerView) -> None:
        points = list(view.points)
        self.options = [TokenOption(point) for point in points]
        self._most_rows = view.max_batch_rows
        table = _table(tuple(profiled(point, view.max_batch_rows) for point in points))
        now = np.array([point.seconds(view.max_batch_rows) for point in points])
        ratios = np.divide(now, table[:, -1], out=np.ones(now.size), where=table[:, -1] > 0)
        self._seconds = table * ratios[:, None]
        self._add_escalations(points)

    def _add_escalations(self, points: Sequence[Point]) -> None:
        """Add the escalations that no other option beats in both seconds and accuracy."""
        indices = {point.name: index for index, point in enumerate(points)}
        sizes = np.arange(self._most_rows + 1)
        found = [
            (index, escalation)
            for index, point in enumerate(points)
            for escalation in point.escalations
            if escalation.to in indices
        ]
        for index, escalation in found:
            escalation_seconds = self._seconds[indices[escalation.to]][escalated_rows(escalation, sizes)]
            seconds, option = (
                self._seconds[index] + escalation_seconds,
                TokenOption(points[index], escalation, points[indices[escalation.to]]),
            )
            accuracy = np.array([each.accuracy for each in self.options])
            if not ((self._seconds[:, -1] <= seconds[-1]) & (accuracy >= escalation.accuracy)).any():
                self.options.append(option)
                self._seconds = np.concatenate([self._seconds, seconds[None]])

    @property
    def row_seconds(self) -> Floats:
        """Seconds of a row in a full batch by option. Shape (options,)."""
        found: Floats = self._seconds[:, -1] / self._most_rows
        return found

    def seconds(self, rows: Integers) -> Floats:
        """Return the seconds of batches. Shape (batches, options)."""
        found: Floats = self._seconds[:, rows].T
        return found

    def accuracies(self, tasks: Sequence[str]) -> Floats:
        """Return the accuracies by task and option. Shape (tasks, options)."""
        return np.array([[option.accuracy_for(task) for option in self.options] for task in tasks])

    def values(self, by_task: Sequence[Mapping[str, float]]) -> Floats:
        """Return utility times accuracy of batches. Shape (batches, options).

        Args:
            by_task: utility of all rows of each batch, by task.
        """
        tasks = list({task: None for weights in by_task for task in weights})
        weights = np.array([[given.get(task, 0.0) for task in tasks] for given in by_task])
        found: Floats = weights @ self.accuracies(tasks)
        return found


def increasing_value(seconds: Floats, values: Floats) -> tuple[Integers, list[Integers]]:
    """Sort the options of each batch by seconds, and keep those worth more than every faster one.

    Args:
        seconds: shape (batches, options).
        values: the same shape; −inf if an option may not serve a batch.

    Returns:
        The sorted options, shape (batches, options), and the kept ones of each batch.
    """
    order = np.argsort(seconds, axis=1, kind="stable")
    sorted_values = np.take_along_axis(values, order, axis=1)
    best = np.maximum.accumulate(sorted_values, axis=1)
    keeps = sorted_values > -inf
    keeps[:, 1:] &= sorted_values[:, 1:] > best[:, :-1] + _ROUNDING
    return order, [indices[keep] for indices, keep in zip(order, keeps, strict=True)]


@lru_cache(maxsize=64)
def _table(seconds: tuple[tuple[float, ...], ...]) -> Floats:
    """Return the seconds of batches of 0, 1, 2, … rows. Shape (points, rows + 1)."""
    table = np.zeros((len(seconds), len(seconds[0]) + 1))
    table[:, 1:] = seconds
    return table
