"""Observations of one operating point: the change of its accuracy, as decaying means over its rows.

A short memory shows a large change within some hundred rows, a long one a small change within some thousand. The long
one begins anew after a large change, so that a repaired point is trusted again.
"""

import math
from collections.abc import Sequence

DECAY_ROWS, DECAY_ESCALATED_ROWS, DECAY_SHADOW_ROWS = 200.0, 100.0, 300.0  # until an observation weighs one third
DECAY_LONG_ROWS = 5000.0
FORGET_SECONDS = 600.0  # seconds without a row of a point after which its observations are forgotten
PRIOR_ROWS, PRIOR_SHADOW_ROWS = 10.0, 200.0  # pseudo-observations that agree with the profile; of rows and shadow rows
MIN_ROWS, MIN_ESCALATED_ROWS = 100, 50  # observations required before drift is reported
MIN_LONG_ROWS = 1000
MIN_DRIFT, MIN_ESCALATED_DRIFT = 0.04, 0.1  # of some hundred rows; of escalated rows, five points of confidence count
MIN_LONG_DRIFT = 0.0075  # served rows of the profile's kind are less than half a point from it
SHIFT_TOLERANCE = 0.5  # of an expected shift: it was measured with one variant, and is similar for others
MIN_STANDARD_ERRORS, MIN_LONG_ERRORS = 3.0, 3.5  # standard errors that a reported change must exceed
_VARIANCES = (0.06, 0.12)  # upper bounds: of confidences, and of the difference of one comparison from its prediction


class _Mean:
    """A decaying mean, and that of squares."""

    __slots__ = ("kept", "squares", "total", "weight")

    def __init__(self, kept: float) -> None:
        self.kept, self.weight, self.total, self.squares = kept, 0.0, 0.0, 0.0

    def add(self, total: float, weight: float, squares: float = 0.0) -> None:
        """Add values of this total weight, weighted total and weighted sum of squares."""
        keep = math.exp(-weight / self.kept)
        self.weight = keep * self.weight + weight
        self.total = keep * self.total + total
        self.squares = keep * self.squares + squares

    def forget(self, rows: float) -> None:
        keep = math.exp(-rows / self.kept)
        self.weight *= keep
        self.total *= keep
        self.squares *= keep

    def value(self, prior: float, rows: float) -> float:
        return (self.total + rows * prior) / (self.weight + rows)


class Observations:
    """Observed change of one point, by first-pass rows, by escalated rows and by shadow rows."""

    def __init__(self, samples: int) -> None:
        """`samples` are those of the profiled mean confidence."""
        self.rows = self.escalated_rows = 0.0
        self.seen_at = 0.0
        self.fell_at: float | None = None  # since when a lower accuracy is reported; None if none is
        self.shadow_correction = _Mean(DECAY_SHADOW_ROWS)
        self._samples = samples
        self._times = _Mean(DECAY_ROWS)
        self._confidence = _Mean(DECAY_ROWS)
        self._shift = _Mean(DECAY_ROWS)
        self._escalation_gain = _Mean(DECAY_ESCALATED_ROWS)
        self._forget_long()

    def _forget_long(self) -> None:
        self._long = _Mean(DECAY_LONG_ROWS)

    def add(self, changes: Sequence[float], weight: float, shift: float = 0.0) -> None:
        """Add first-pass rows of this weight each, by their confidence less the expected mean.

        `shift`: how far the expected mean is from the profiled one. A large change begins the long memory anew.
        """
        rows, total = weight * len(changes), weight * sum(changes)
        self.rows += rows
        self._confidence.add(total, rows)
        self._long.add(total, rows, weight * sum([change * change for change in changes]))
        self._shift.add(abs(shift) * rows, rows)
        self._times.add(self.seen_at * rows, rows)
        self._escalation_gain.forget(rows)
        if self._large_change() is not None:
            self._forget_long()

    def add_escalated(self, gain: float, rows: float) -> None:
        """Add escalated rows, by the sum of the confidence they gained less the profiled gain."""
        self.escalated_rows += rows
        self._escalation_gain.add(gain, rows)
        self._confidence.forget(rows)
        self._long.forget(rows)

    def change(self) -> float | None:
        """Return the change of accuracy; None if it is not significant."""
        by_rows = self.change_by_rows()
        return by_rows if by_rows is not None else self._change_by_escalations()

    def change_by_rows(self) -> float | None:
        large = self._large_change()
        return large if large is not None else self._small_change()

    def _large_change(self) -> float | None:
        if self.rows < MIN_ROWS:
            return None
        correction = self.shadow_correction.value(0.0, PRIOR_SHADOW_ROWS)
        change = self._confidence.value(0.0, PRIOR_ROWS) + correction
        own, audits = (
            (_VARIANCES[0], self._confidence, PRIOR_ROWS),
            (_VARIANCES[1], self.shadow_correction, PRIOR_SHADOW_ROWS),
        )
        least = max(MIN_DRIFT + self._shift_error, MIN_STANDARD_ERRORS * _error(own, audits))
        return change if abs(change) > least else None

    @property
    def _shift_error(self) -> float:
        return SHIFT_TOLERANCE * self._shift.value(0.0, PRIOR_ROWS)

    def _small_change(self) -> float | None:
        """Return the change over the long memory; its own error counts, and that of the profile."""
        rows = self._long.weight
        if rows < MIN_LONG_ROWS:
            return None
        change = self._long.value(0.0, PRIOR_ROWS)
        variance = self._long.squares / rows - self._long.value(0.0, 0.0) ** 2
        error = math.sqrt(max(variance, 0.0) * (1.0 / rows + 1.0 / self._samples))
        correction = self.shadow_correction.value(0.0, PRIOR_SHADOW_ROWS)
        least = max(MIN_LONG_DRIFT + self._shift_error, MIN_LONG_ERRORS * error)
        return change + correction if min(abs(change), abs(change + correction)) > least else None

    def _change_by_escalations(self) -> float | None:
        change = self._escalation_gain.value(0.0, PRIOR_ROWS)
        error = _error((_VARIANCES[0], self._escalation_gain, PRIOR_ROWS))
        least = max(MIN_ESCALATED_DRIFT, MIN_STANDARD_ERRORS * error)
        return change if self.escalated_rows >= MIN_ESCALATED_ROWS and abs(change) > least else None

    def is_newer_than(self, now: float) -> bool:
        return self.rows >= MIN_ROWS and self._times.value(0.0, 0.0) > now


def _error(*parts: tuple[float, _Mean, float]) -> float:
    """Return an upper bound of the standard error of a sum of means, each with its variance and its prior."""
    return math.sqrt(sum(variance * mean.weight / (mean.weight + prior) ** 2 for variance, mean, prior in parts))
