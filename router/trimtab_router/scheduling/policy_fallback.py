"""A policy as a desk asks it: where it fails another decides, for a stage of which nothing leaves is lost. Pure."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from trimtab_router.scheduling.interfaces import StatsSink
from trimtab_router.scheduling.policies import earliest_deadline_first
from trimtab_router.scheduling.policies.interface import Dispatch, Policy, SchedulerView, WaitUntil

Decide = Callable[[SchedulerView], Dispatch | WaitUntil]


def with_fallback(policy: Policy, stats: StatsSink) -> Policy:
    """The policy, but that the most urgent leave by `urgent_first` where it raises.

    Args:
        policy: as it is.
        tally: is told of each time.
    """
    return replace(policy, decide=partial(_decide, policy.decide, stats))


def _decide(decide: Decide, stats: StatsSink, view: SchedulerView) -> Dispatch | WaitUntil:
    try:
        return decide(view)
    except Exception as error:  # noqa: BLE001 - whatever it is, it would come again at the next look
        stats.record_policy_error(error)
        return earliest_deadline_first.decide(view)
