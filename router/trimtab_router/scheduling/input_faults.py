"""Which input fails, told from the points whose accuracy fell, and what that does to points that read it too. Pure.

A point that reads an input which says nothing is no better than the one that reads the rest, and a little worse since
noise misleads it. So an input explains a fall where a good part of what it was worth was lost, and hardly more than all
of it. What all falls have in common is to blame, unless a point that reads it was seen since to be as good as ever.
Where several inputs may be it, each point is believed to be as good as the kindest of these explanations has it:
whichever is used is then seen, and tells them apart.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

LEAST_LOST = 0.4
"""Of what an input was worth, to have failed altogether: models are too certain of answers from noise."""
MISLED = 0.03
"""How much worse than without it a point is that reads an input which fails."""


@dataclass(frozen=True, slots=True)
class AccuracyEstimate:
    """What is known of a point."""

    point: str
    """Its name."""
    inputs: frozenset[str]
    """Its inputs."""
    measured: float
    """As it was measured."""
    observed: float | None = None
    """What it fell to; None where it was not seen to."""
    escalated_only: bool = False
    """Whether that was seen only on rows which other points doubted; over all rows it fell less."""
    observed_at: float = 0.0
    """Seconds, when a row was answered by it last."""
    confirmed: bool = False
    """Whether it was seen to be as good as ever after the others fell."""

    @property
    def believed(self) -> float:
        """How accurate it is by what was seen of it alone."""
        return self.measured if self.observed is None else self.observed


def suspect_inputs(beliefs: Sequence[AccuracyEstimate], before: Collection[str] = ()) -> frozenset[str]:
    """The inputs one of which must have failed; what was seen last counts before what it contradicts.

    Args:
        beliefs: of all points of a variant.
        before: what was suspected lately. Half the loss keeps it so: a point that nobody uses any more tells no more.
    """
    cleared = frozenset().union(*(belief.inputs for belief in beliefs if belief.confirmed))
    found: frozenset[str] = frozenset()
    for belief in sorted(beliefs, key=lambda one: -one.observed_at):
        if belief.observed is not None:
            own = frozenset(_explaining(beliefs, belief, belief.observed, before)) - cleared
            found = found & own or found or own
    return found


def lower_estimates(beliefs: Sequence[AccuracyEstimate], failing: Collection[str]) -> dict[str, float]:
    """The accuracies of points that are to be believed less than what was seen of them alone has it.

    Args:
        beliefs: of all points of a variant.
        failing: the inputs one of which has failed.
    """
    found = {}
    for belief in beliefs:
        kindest = max((_reading(beliefs, belief, name) for name in failing), default=1.0)
        if not belief.confirmed and kindest < belief.believed:
            found[belief.point] = kindest
    return found


def _explaining(
    beliefs: Sequence[AccuracyEstimate], fallen: AccuracyEstimate, now: float, before: Collection[str]
) -> Iterator[str]:
    """The inputs whose failure explains why a point fell so far."""
    for name in fallen.inputs:
        rest = fallen.inputs - {name}
        if rest and not any(other.inputs == rest for other in beliefs):
            continue
        without = min(_without(beliefs, fallen, name), fallen.measured)
        least = (LEAST_LOST / 2 if name in before else LEAST_LOST) * (fallen.measured - without)
        if fallen.measured - now >= least and (fallen.escalated_only or now >= without - MISLED):
            yield name


def _reading(beliefs: Sequence[AccuracyEstimate], belief: AccuracyEstimate, name: str) -> float:
    """How accurate a point is at most where an input says nothing."""
    if name not in belief.inputs:
        return belief.believed
    return min(max(_without(beliefs, belief, name) - MISLED, 0.0), belief.believed)


def _without(beliefs: Sequence[AccuracyEstimate], belief: AccuracyEstimate, name: str) -> float:
    """How accurate the best point is that reads the rest or less; what reads nothing names nothing right."""
    rest = belief.inputs - {name}
    return max((other.believed for other in beliefs if other.inputs <= rest), default=0.0)
