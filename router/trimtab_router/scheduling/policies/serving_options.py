"""Serving options: every way to serve rows, which is at an operating point, or at one with an escalation to another.

Planners with different objectives choose from the same options.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab_router.scheduling.policies.interface import Escalation, Point


@dataclass(frozen=True, slots=True)
class ServingOption:
    """A way to serve rows: all at `point`; with an escalation, its low-confidence rows again at `escalation.to`."""

    point: str
    accuracy: float
    """Expected over all rows, after the escalation."""
    point_index: int
    escalation: Escalation | None = None
    escalation_index: int = -1
    """Index of the point that serves escalated rows; -1 without an escalation."""


@dataclass(frozen=True, slots=True)
class PointCost:
    """A point's seconds for batches of 1, 2, … rows, and its accuracy and escalations for a task."""

    name: str
    accuracy: float
    seconds: tuple[float, ...]
    escalations: tuple[Escalation, ...]


def serving_options(points: Sequence[Point | PointCost]) -> list[ServingOption]:
    """Return each point as an option, then each escalation to another of the points."""
    indices = {point.name: index for index, point in enumerate(points)}
    options = [ServingOption(point.name, point.accuracy, index) for index, point in enumerate(points)]
    return options + [
        ServingOption(point.name, escalation.accuracy, index, escalation, indices[escalation.to])
        for index, point in enumerate(points)
        for escalation in point.escalations
        if escalation.to in indices
    ]


def profiled(point: Point, max_rows: int) -> tuple[float, ...]:
    """Return the seconds of batches of 1, 2, … rows: profiled, else predicted."""
    return point.profiled[:max_rows] or tuple(point.seconds(rows) for rows in range(1, max_rows + 1))
