"""Pruning of measured escalations: those that another option of the stage dominates in cost and accuracy are left out.

The cost of an option is the seconds that an average row takes. A point also dominates escalations that cost more and
gain a negligible accuracy. Without measured seconds, more accurate points count as heavier, and an option costs less if
its points are no heavier and it escalates no larger share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from trimtab_pipelines.escalation import Escalation, Key

MAX_PER_PAIR = 3
"""Escalations that are kept for each pair of points of different variants."""
NEGLIGIBLE_ACCURACY = 0.0025
"""Worth no extra time: a set of thousands of samples cannot resolve it."""


@dataclass(frozen=True, slots=True)
class _Option:
    """A point, or an escalation."""

    costs: tuple[float, ...]
    accuracy: float

    def dominates(self, other: "_Option") -> bool:
        no_worse = self.accuracy >= other.accuracy and all(a <= b for a, b in zip(self.costs, other.costs, strict=True))
        return no_worse and self != other


def undominated_escalations(
    by_point: Mapping[Key, Sequence[Escalation]],
    accuracies: Mapping[Key, float],
    seconds: Mapping[Key, float] = MappingProxyType({}),
) -> dict[Key, tuple[Escalation, ...]]:
    """Escalations of a stage without dominated ones to other variants, at most a few per pair, evenly over its shares.

    Escalations within a variant remain. `seconds` are those of a row at each point; empty if they are unknown.
    """

    def option(first: Key, escalation: Escalation) -> _Option:
        then = escalation.target(first[0])
        if seconds:
            return _Option((seconds[first] + escalation.share * seconds[then],), escalation.accuracy)
        return _Option((accuracies[first], accuracies[then], escalation.share), escalation.accuracy)

    rivals = [_Option((cost,), round(accuracies[key] + NEGLIGIBLE_ACCURACY, 4)) for key, cost in seconds.items()]
    rivals += [option(first, escalation) for first, listed in by_point.items() for escalation in listed]
    kept: dict[Key, tuple[Escalation, ...]] = {}
    for first, listed in by_point.items():
        pairs: dict[Key, list[Escalation]] = {}
        for escalation in listed:
            own = option(first, escalation)
            if not escalation.variant or not any(rival.dominates(own) for rival in rivals):
                pairs.setdefault(escalation.target(first[0]), []).append(escalation)
        kept[first] = tuple(escalation for pair in pairs.values() for escalation in _thinned(pair))
    return kept


def _thinned(pair: Sequence[Escalation]) -> Sequence[Escalation]:
    if len(pair) <= MAX_PER_PAIR or not pair[0].variant:
        return pair
    by_share = sorted(pair, key=lambda escalation: escalation.share)
    return [by_share[round(index * (len(pair) - 1) / (MAX_PER_PAIR - 1))] for index in range(MAX_PER_PAIR)]
