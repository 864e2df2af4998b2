"""Whether the accuracies that a plan counts on still hold, from what models say and from rows answered twice. Pure.

A model's certainty, where it is the probability that it is right, says of every row how often it is right by now. Of a
small share of the rows the best point gives an answer too; how often that agrees mends what the first one says of
itself (prediction-powered inference: Angelopoulos, Bates, Fannjiang, Jordan, Zrnic 2023). A point that only looks again
at what others doubt sees no rows like all others; of these it must be so much more certain than the first point was as
a look was measured to win. Old rows are forgotten, and what nobody sees any more is believed anew after a while: else a
point that works again would never be used again.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab_protocol.tensors import Array

KEPT_ROWS, KEPT_LOOKS, KEPT_AUDITS = 200.0, 100.0, 300.0
"""After so many more, what was seen counts a third."""
KEPT_SECONDS = 600.0
"""After so long without any row of a point, what was seen of it is forgotten."""
PRIOR_ROWS, PRIOR_AUDITS = 10.0, 200.0
"""How many rows the measured accuracy counts as, and how many that agreed as often as said."""
LEAST_ROWS, LEAST_LOOKS = 100, 50
"""Before so many rows were seen, or seen again, nothing is said to have drifted."""
DRIFT, LOOK_DRIFT = 0.04, 0.1
"""By how much an accuracy must have changed to be told, at the least; of rows that were picked out a model's certainty
is right within five points or so, where it is within two of all rows;"""
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
    """What is known of one point: from rows it saw first, from rows it saw again, and from comparisons."""

    def __init__(self, expected: float) -> None:
        self.expected = expected
        self.rows = self.looks = 0
        self.seen_at = 0.0
        self.certainty = _Mean(KEPT_ROWS)
        self.wins = _Mean(KEPT_LOOKS)
        self.mending = _Mean(KEPT_AUDITS)

    @property
    def drifted(self) -> float | None:
        """How often it is right by now; None where that is nothing new."""
        mended = self.mending.value(0.0, PRIOR_AUDITS)
        change = self.certainty.value(self.expected, PRIOR_ROWS) + mended - self.expected
        own, audits = (_VARIANCES[0], self.certainty, PRIOR_ROWS), (_VARIANCES[1], self.mending, PRIOR_AUDITS)
        if self.rows < LEAST_ROWS or abs(change) <= max(DRIFT, SURENESS * _error(own, audits)):
            change = self.wins.value(0.0, PRIOR_ROWS)
            least = max(LOOK_DRIFT, SURENESS * _error((_VARIANCES[0], self.wins, PRIOR_ROWS)))
            if self.looks < LEAST_LOOKS or abs(change) <= least:
                return None
        return min(max(self.expected + change, 0.0), 1.0)


def _error(*parts: tuple[float, _Mean, float]) -> float:
    """The standard error of a sum of means, each with its variance and its prior, at most."""
    return math.sqrt(sum(variance * mean.weight / (mean.weight + prior) ** 2 for variance, mean, prior in parts))


class AccuracyWatch:
    """The points of one stage, by variant and name."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], _Seen] = {}
        self.audits: dict[tuple[str, str], int] = defaultdict(int)
        """Rows that the best point answered too."""

    def saw(self, key: tuple[str, str], expected: float, certainties: Array, now: float) -> None:
        """Rows were answered for the first time.

        Args:
            key: by which variant at which point.
            expected: its accuracy, as it was measured.
            certainties: of each row; what is no probability says nothing.
            now: seconds.
        """
        given = np.asarray(certainties, dtype=np.float64)
        given = given[_told(given)]
        if given.size:
            seen = self._of(key, expected, now)
            seen.rows += given.size
            seen.certainty.add(given)
            seen.wins.forget(given.size)

    def saw_again(
        self, key: tuple[str, str], expected: float, certainties: Array, before: Array, won: float, now: float
    ) -> None:
        """Rows that another point was not certain of were answered once more.

        Args:
            key: by which variant at which point.
            expected: its accuracy over all rows, as it was measured.
            certainties: of each row.
            before: those of the first look.
            won: right answers that such a look wins a row, as it was measured.
            now: seconds.
        """
        given, first = (np.asarray(each, dtype=np.float64) for each in (certainties, before))
        known = _told(given) & _told(first)
        if known.any():
            seen = self._of(key, expected, now)
            seen.looks += int(known.sum())
            seen.wins.add((given - first)[known] - won)
            seen.certainty.forget(int(known.sum()))

    def compared(self, key: tuple[str, str], certainty: float, best_certainty: float, *, agrees: bool) -> None:
        """A row had an answer of the best point too, which is the better witness of what is right."""
        seen = self._seen.get(key)
        if seen is not None and 0.0 <= certainty <= 1.0 and 0.0 <= best_certainty <= 1.0:
            right = best_certainty if agrees else (1.0 - best_certainty) * certainty
            seen.mending.add(np.array([right - certainty]))
            self.audits[key] += 1

    def drifted(self, now: float) -> dict[tuple[str, str], float]:
        """The points that are no longer as accurate as they were measured to be, and how accurate they are by now."""
        self._seen = {key: seen for key, seen in self._seen.items() if now - seen.seen_at < KEPT_SECONDS}
        told = ((key, seen.drifted) for key, seen in self._seen.items())
        return {key: accuracy for key, accuracy in told if accuracy is not None}

    def _of(self, key: tuple[str, str], expected: float, now: float) -> _Seen:
        seen = self._seen.get(key)
        if seen is None or seen.expected != expected:  # another model by the same name
            seen = self._seen[key] = _Seen(expected)
        seen.seen_at = now
        return seen


def _told(certainties: NDArray[np.float64]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (certainties >= 0.0) & (certainties <= 1.0)
    return found
