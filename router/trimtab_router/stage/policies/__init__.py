"""Who leaves next, at which operating point, and who is dropped: one file a policy, all with the same signature.

A policy sees what waits and what the plan allows, and answers with one departure, or that nothing leaves yet. It is
pure, so that router and simulator run the same.
"""

from collections.abc import Mapping

from trimtab_router.stage.policies import (
    aggressive,
    all_modalities,
    modality_mix,
    mosel,
    random_mix,
    slack_fit,
    urgent_first,
)
from trimtab_router.stage.policies.view import Policy

POLICIES: Mapping[str, Policy] = {
    "UrgentFirst": urgent_first.POLICY,
    "SlackFit": slack_fit.POLICY,
    "ModalityMix": modality_mix.POLICY,
    "Mosel": mosel.POLICY,
    "AllModalities": all_modalities.POLICY,
    "Aggressive": aggressive.POLICY,
    "Random": random_mix.POLICY,
}
"""By the names users know them by."""
