"""Which operating point does a batch run at? One file a policy, all with the same signature.

A policy sees the batch about to leave and names one of the points the plan allows. It is pure, so that a simulator can
run it as well.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchView:
    """What a policy may look at.

    `slack_seconds` is the time left to the most urgent row after this batch's later stages; `predict_seconds` tells how
    long the batch would take at a point.
    """

    rows: int
    slack_seconds: float
    planned_point: str
    fallback_points: tuple[str, ...]
    predict_seconds: Callable[[str], float]


Policy = Callable[[BatchView], str]
