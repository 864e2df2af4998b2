"""A policy as a desk asks it: where it fails another decides, for a stage of which nothing leaves is lost. Pure."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from trimtab_router.stage.policies import urgent_first
from trimtab_router.stage.policies.view import Departure, NotBefore, Policy, View
from trimtab_router.stage.ports import Tally

Decide = Callable[[View], Departure | NotBefore]


def always_decides(policy: Policy, tally: Tally) -> Policy:
    """The policy, but that the most urgent leave by `urgent_first` where it raises.

    Args:
        policy: as it is.
        tally: is told of each time.
    """
    return replace(policy, decide=partial(_decide, policy.decide, tally))


def _decide(decide: Decide, tally: Tally, view: View) -> Departure | NotBefore:
    try:
        return decide(view)
    except Exception as error:  # noqa: BLE001 - whatever it is, it would come again at the next look
        tally.undecided(error)
        return urgent_first.decide(view)
