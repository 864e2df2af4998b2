"""Shadow price of replica time: expected correct responses per second.

At a constant, divisible load the best use of a stage is a mix of operating points that yields the most correct
responses in the replicas' seconds. The shadow price is the dual value of these seconds in that linear program: the
slope of the best mixes' curve at the available seconds. The router serves a row with a more accurate option only if the
gain per second exceeds the price; if there is time for the best point for every row, the price is 0.

A plan's price is computed from the profile. The router recomputes it from observed service times, since slower batches
yield fewer correct responses per second and use up the available seconds earlier.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from trimtab_pipelines.escalation import EscalationPlan, Key
from trimtab_pipelines.plan import StagePlan
from trimtab_pipelines.row_shares import AnsweredBy

RowOption = tuple[float, float, dict[AnsweredBy, float]]
"""Seconds of a row, accuracy, and shares of the rows by the point that answers them."""
Corner = TypeVar("Corner", bound=tuple[Any, ...])
"""Seconds and accuracy, and what has them."""
BUSY_SHARE = 0.85
"""Usable share of a replica's seconds; the rest absorbs variation."""


def shadow_price(points: Sequence[tuple[float, float]], rows_rps: float, replicas: int) -> float:
    """Expected correct responses per second of replica time.

    A point is (seconds of a row in a full batch, accuracy); the replicas share the expected rows per second.
    """
    if rows_rps <= 0:
        return 0.0
    return best_mix(points, seconds_per_row(rows_rps, replicas))[1]


def seconds_per_row(rows_rps: float, replicas: int) -> float:
    """Replica seconds available for a row at a rate above 0."""
    return BUSY_SHARE * replicas / rows_rps


def with_shadow_price(stage: StagePlan, rows_rps: float) -> StagePlan:
    """A stage's plan with its shadow price; 0 if service times are unknown."""
    price = shadow_price([option[:2] for option in row_options(stage)], rows_rps, stage.replicas)
    return stage.replace(shadow_price=price, shadow_price_at_rps=max(rows_rps, 0.0))


def observed_shadow_price(stage: StagePlan, service_ratio: float) -> float:
    """The shadow price with service times scaled by a ratio; a plan without a rate keeps its price."""
    if not stage.shadow_price_at_rps:
        return stage.shadow_price
    slower = [(seconds * service_ratio, accuracy) for seconds, accuracy, _ in row_options(stage)]
    return shadow_price(slower, stage.shadow_price_at_rps, stage.replicas)


def row_options(stage: StagePlan) -> list[RowOption]:
    """Each option of a row in full batches, including escalations."""
    points, seconds = {point.key(stage.variant): point for point in stage.points}, row_seconds(stage)
    options: list[RowOption] = [
        (seconds.get(key, 0.0), point.accuracy, {AnsweredBy(*key): 1.0}) for key, point in points.items()
    ]
    escalations = ((key, escalation) for key, point in points.items() for escalation in point.escalations)
    options += [
        (seconds[first] + escalation.share * again, escalation.accuracy, escalated_shares(first, escalation))
        for first, escalation in escalations
        if seconds.get(first, 0.0) > 0 and (again := seconds.get(escalation.target(first[0]), 0.0)) > 0
    ]
    return options


def row_seconds(stage: StagePlan) -> dict[Key, float]:
    """Seconds of a row in full batches, by the points whose seconds are known."""
    size = stage.batch_size
    return {
        point.key(stage.variant): point.service_seconds[size] / size
        for point in stage.points
        if size in point.service_seconds
    }


def escalated_shares(first: Key, escalation: EscalationPlan) -> dict[AnsweredBy, float]:
    """Shares of the rows that the first point, and the second point of an escalation, answer."""
    second = AnsweredBy(*escalation.target(first[0]), escalated=True)
    return {AnsweredBy(*first): 1.0 - escalation.share, second: escalation.share}


def best_mixes(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Best mixes of options: the corners of the upper hull of (seconds, accuracy), starting at serving no row."""
    return upper_hull([(0.0, 0.0), *(point for point in points if point[0] > 0)])


def upper_hull(corners: Iterable[Corner]) -> list[Corner]:
    """Corners of the upper hull of (seconds, accuracy), the quickest first."""
    hull: list[Corner] = []
    for corner in sorted(corners, key=lambda corner: (corner[0], -corner[1])):
        extend_hull(hull, corner)
    return hull


def extend_hull(hull: list[Corner], corner: Corner) -> bool:
    """Add a corner to the upper hull of those that take no more seconds; return whether it is more accurate."""
    if hull and corner[1] <= hull[-1][1]:
        return False
    while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], corner):
        hull.pop()
    hull.append(corner)
    return True


def best_mix(points: Sequence[tuple[float, float]], seconds: float) -> tuple[float, float]:
    """Accuracy of the best mix within these seconds per row, and the accuracy gained per additional second.

    Unserved rows are part of the mix.
    """
    curve = best_mixes(points)
    for left, right in pairwise(curve):
        if seconds < right[0]:
            slope = _slope(left, right)
            return left[1] + slope * (max(seconds, 0.0) - left[0]), slope
    return curve[-1][1], 0.0


def _slope(left: tuple[Any, ...], right: tuple[Any, ...]) -> float:
    return float((right[1] - left[1]) / (right[0] - left[0]))
