"""Looking twice at what a model is not certain of: what that keeps, and from which certainty on it need not. Pure.

A cheap point answers all rows; those it is less certain of than a threshold are answered again by a better one. Which
threshold will do is not read off a mean: among so many some look good by chance. It is tested, as Learn then Test does
(Angelopoulos, Bates, Candès, Jordan, Lei 2021, section 4): thresholds stand in an order fixed before, from those that
look again at everything to those that look at nothing, and each must reject, by the exact binomial, that accuracy is
below the floor. The first that does not ends it. So all that passed hold together with the confidence of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.floors import at_least

CONFIDENCE = 0.95
STEPS = 100
"""Thresholds that are tried: 0.01, 0.02, … of certainty."""


@dataclass(frozen=True, slots=True, eq=False)
class Looks:
    """Held-out rows that were seen at both points, none of which either was trained or tuned on.

    Attributes:
        certainty: of the cheap point, 0…1. Shape (rows,).
        right: whether the cheap point was. Shape (rows,).
        right_again: whether the better point was. Shape (rows,).
    """

    certainty: NDArray[np.floating]
    right: NDArray[np.bool_]
    right_again: NDArray[np.bool_]

    def __post_init__(self) -> None:
        if not self.certainty.size == self.right.size == self.right_again.size > 0:
            sizes = f"{self.certainty.size}, {self.right.size} and {self.right_again.size}"
            raise ValueError(f"certainty, right and right_again must be of the same rows, at least one; got {sizes}")


@dataclass(frozen=True, slots=True)
class Look:
    """A threshold: which share of rows is less certain than `below`, and the accuracy of all if these go again."""

    below: float
    share: float
    accuracy: float


def curve(looks: Looks, shares: Sequence[float]) -> list[Look]:
    """The accuracy kept when the least certain share of the rows is answered again.

    Args:
        looks: held-out rows.
        shares: 0…1.
    """
    order = np.argsort(looks.certainty, kind="stable")
    known = looks.certainty[order]
    first, again = looks.right[order], looks.right_again[order]
    found = []
    for share in shares:
        count = round(share * known.size)
        below = float(known[count]) if count < known.size else 1.0 + 1.0 / STEPS
        hits = int(again[:count].sum() + first[count:].sum())
        found.append(Look(below, count / known.size, hits / known.size))
    return found


def at_threshold(looks: Looks, below: float) -> Look:
    """What a threshold does on held-out rows."""
    doubted = looks.certainty < below
    right = np.where(doubted, looks.right_again, looks.right)
    return Look(below, float(doubted.mean()), float(right.mean()))


def safe_threshold(looks: Looks, floor: float, confidence: float = CONFIDENCE) -> Look | None:
    """The lowest threshold at which accuracy is at least the floor, with this confidence.

    Args:
        looks: held-out rows.
        floor: above 0 and below 1.
        confidence: that it holds for rows of the same kind that nobody has seen yet.

    Returns:
        The threshold; None where not even looking at everything again is that surely good enough.
    """
    rows, passed = looks.certainty.size, None
    for step in range(STEPS + 1, -1, -1):  # above 1: all rows go again
        look = at_threshold(looks, step / STEPS)
        hits = round(look.accuracy * rows)
        if at_least(hits, rows, floor) > 1.0 - confidence:
            break
        passed = look
    return passed
