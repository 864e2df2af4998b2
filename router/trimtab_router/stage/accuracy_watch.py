"""Whether the accuracies that a plan counts on still hold, from what models say and from rows answered twice. Pure.

A model's certainty, where it is the probability that it is right, says of every row how often it is right by now. Of a
small share of the rows the best point gives an answer too; how often that agrees mends what the first one says of
itself (prediction-powered inference: Angelopoulos, Bates, Fannjiang, Jordan, Zrnic 2023). Old rows are forgotten.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from trimtab_protocol.tensors import Array

KEPT_ROWS, KEPT_AUDITS = 200.0, 300.0
"""After so many more, what was seen counts a third."""
PRIOR_ROWS, PRIOR_AUDITS = 10.0, 200.0
"""How many rows the measured accuracy counts as, and how many that agreed as often as said."""
LEAST_ROWS = 100
"""Before so many rows were seen, nothing is said to have drifted."""
DRIFT = 0.04
"""By how much an accuracy must have changed to be told, at the least;"""
SURENESS = 3.0
"""and how many standard errors of what was seen."""
_VARIANCES = (0.06, 0.12)
"""Of certainties, and of how far a single comparison is from what was said: as wide as they get."""


@dataclass(slots=True)
class _Mean:
    """A mean that forgets."""

    kept: float
    weight: float = 0.0
    total: float = 0.0

    def add(self, values: Array) -> None:
        keep = float(np.exp(-values.size / self.kept))
        self.weight = self.weight * keep + values.size
        self.total = self.total * keep + float(values.sum())

    def value(self, prior: float, rows: float) -> float:
        return (self.total + rows * prior) / (self.weight + rows)


class _Seen:
    """What is known of one point."""

    def __init__(self, expected: float) -> None:
        self.expected = expected
        self.rows = 0
        self.certainty = _Mean(KEPT_ROWS)
        self.mending = _Mean(KEPT_AUDITS)

    @property
    def estimate(self) -> float:
        """How often it is right by now."""
        mean = self.certainty.value(self.expected, PRIOR_ROWS) + self.mending.value(0.0, PRIOR_AUDITS)
        return min(max(mean, 0.0), 1.0)

    @property
    def error(self) -> float:
        """The standard error of the estimate, at most."""
        parts = zip(_VARIANCES, (self.certainty, self.mending), (PRIOR_ROWS, PRIOR_AUDITS), strict=True)
        return math.sqrt(sum(variance * mean.weight / (mean.weight + prior) ** 2 for variance, mean, prior in parts))


class AccuracyWatch:
    """The points of one stage, by variant and name."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], _Seen] = {}
        self.audits: dict[tuple[str, str], int] = defaultdict(int)
        """Rows that the best point answered too."""

    def saw(self, key: tuple[str, str], expected: float, certainties: Array) -> None:
        """Rows were answered for the first time.

        Args:
            key: by which variant at which point.
            expected: its accuracy, as it was measured.
            certainties: of each row; what is no probability says nothing.
        """
        given = np.asarray(certainties, dtype=np.float64)
        given = given[(given >= 0.0) & (given <= 1.0)]
        if given.size:
            seen = self._of(key, expected)
            seen.rows += given.size
            seen.certainty.add(given)

    def compared(self, key: tuple[str, str], certainty: float, best_certainty: float, *, agrees: bool) -> None:
        """A row had an answer of the best point too, which is the better witness of what is right."""
        seen = self._seen.get(key)
        if seen is not None and 0.0 <= certainty <= 1.0 and 0.0 <= best_certainty <= 1.0:
            right = best_certainty if agrees else (1.0 - best_certainty) * certainty
            seen.mending.add(np.array([right - certainty]))
            self.audits[key] += 1

    def drifted(self) -> dict[tuple[str, str], float]:
        """The points that are no longer as accurate as they were measured to be, and how accurate they are by now."""
        known = {key: seen for key, seen in self._seen.items() if seen.rows >= LEAST_ROWS}
        return {
            key: seen.estimate
            for key, seen in known.items()
            if abs(seen.estimate - seen.expected) > max(DRIFT, SURENESS * seen.error)
        }

    def _of(self, key: tuple[str, str], expected: float) -> _Seen:
        seen = self._seen.get(key)
        if seen is None or seen.expected != expected:  # another model by the same name
            seen = self._seen[key] = _Seen(expected)
        return seen
