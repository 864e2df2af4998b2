"""Broken inputs: those whose loss explains the observed falls of accuracy of operating points.

An input is broken if it explains all falls, each of most of what the input was worth, and no point that reads it was
confirmed since. If several inputs are possible, each point is estimated by the explanation most favorable to it; the
point that is then used separates them.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

LEAST_LOST = 0.4  # share of a broken input's worth that is lost: models are overconfident on noise
MISLED = 0.03  # accuracy that a point loses by reading a broken input, compared with not reading it


@dataclass(frozen=True, slots=True)
class AccuracyEstimate:
    """Estimated accuracy of one operating point."""

    point: str
    inputs: frozenset[str]
    measured: float
    """Profiled accuracy."""
    observed: float | None = None
    """Accuracy after an observed fall; None without one."""
    escalated_only: bool = False
    """Whether the fall was observed on escalated rows only; it is smaller over all rows."""
    observed_at: float = 0.0
    """Time of its last row, in seconds."""
    confirmed: bool = False
    """Whether it was observed to be unchanged after the others fell."""

    @property
    def believed(self) -> float:
        return self.measured if self.observed is None else self.observed


def suspect_inputs(beliefs: Sequence[AccuracyEstimate], before: Collection[str] = ()) -> frozenset[str]:
    """Return the inputs of which one must be broken; those of `before` are kept by half the loss."""
    cleared = frozenset().union(*(belief.inputs for belief in beliefs if belief.confirmed))
    found: frozenset[str] = frozenset()
    for belief in sorted(beliefs, key=lambda one: -one.observed_at):
        if belief.observed is not None:
            own = frozenset(_explaining(beliefs, belief, belief.observed, before)) - cleared
            found = found & own or found or own
    return found


def lower_estimates(beliefs: Sequence[AccuracyEstimate], failing: Collection[str]) -> dict[str, float]:
    """Return the accuracies of points that a broken input of `failing` lowers further than their own observations."""
    found = {}
    for belief in beliefs:
        kindest = max((_reading(beliefs, belief, name) for name in failing), default=1.0)
        if not belief.confirmed and kindest < belief.believed:
            found[belief.point] = kindest
    return found


def _explaining(
    beliefs: Sequence[AccuracyEstimate], fallen: AccuracyEstimate, now: float, before: Collection[str]
) -> Iterator[str]:
    for name in fallen.inputs:
        rest = fallen.inputs - {name}
        if rest and not any(other.inputs == rest for other in beliefs):
            continue
        without = min(_without(beliefs, fallen, name), fallen.measured)
        least = (LEAST_LOST / 2 if name in before else LEAST_LOST) * (fallen.measured - without)
        if fallen.measured - now >= least and (fallen.escalated_only or now >= without - MISLED):
            yield name


def _reading(beliefs: Sequence[AccuracyEstimate], belief: AccuracyEstimate, name: str) -> float:
    """Return an upper bound of a point's accuracy if an input is broken."""
    if name not in belief.inputs:
        return belief.believed
    return min(max(_without(beliefs, belief, name) - MISLED, 0.0), belief.believed)


def _without(beliefs: Sequence[AccuracyEstimate], belief: AccuracyEstimate, name: str) -> float:
    rest = belief.inputs - {name}
    return max((other.believed for other in beliefs if other.inputs <= rest), default=0.0)
