"""Scheduling policies: which batch is dispatched next, at which operating point, and which rows are dropped.

One module a policy, all with the signature of `interface.Policy`. A policy reads a `SchedulerView` and returns a value;
it uses no clock and no randomness, so that the router and the simulator decide alike.
"""

from collections.abc import Mapping

from trimtab_pipelines.scheduling_policies import PolicyTraits, register_scheduling_policy
from trimtab_router.scheduling.policies import earliest_deadline_first, modality_mix, slack_fit, token_adaptive
from trimtab_router.scheduling.policies.interface import Policy

_policies: dict[str, Policy] = {
    "EarliestDeadlineFirst": earliest_deadline_first.POLICY,
    "SlackFit": slack_fit.POLICY,
    "ModalityMix": modality_mix.POLICY,
    "TokenAdaptive": token_adaptive.POLICY,
}
POLICIES: Mapping[str, Policy] = _policies  # by their names in a pipeline's `schedulingPolicy`


def register(name: str, policy: Policy, *, max_batch_rows: int | None = None) -> None:
    """Add a policy to this process. `max_batch_rows`: None for any. ValueError: the product has one of this name."""
    traits = PolicyTraits(uses_fallbacks=policy.uses_fallbacks, max_batch_rows=max_batch_rows)
    register_scheduling_policy(name, traits)
    _policies[name] = policy
