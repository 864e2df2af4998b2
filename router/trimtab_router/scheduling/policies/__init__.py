"""Who leaves next, at which operating point, and who is dropped: one file a policy, all with the same signature.

A policy sees what waits and what the plan allows, and answers with one departure, or that nothing leaves yet. It is
pure, so that router and simulator run the same.
"""

from collections.abc import Mapping

from trimtab_router.scheduling.policies import (
    aggressive,
    all_modalities,
    earliest_deadline_first,
    infaas,
    modality_mix,
    mosel,
    otas,
    pets,
    random_mix,
    slack_fit,
    token_adaptive,
)
from trimtab_router.scheduling.policies.interface import Policy

POLICIES: Mapping[str, Policy] = {
    "EarliestDeadlineFirst": earliest_deadline_first.POLICY,
    "SlackFit": slack_fit.POLICY,
    "ModalityMix": modality_mix.POLICY,
    "TokenAdaptive": token_adaptive.POLICY,
    "Mosel": mosel.POLICY,
    "AllModalities": all_modalities.POLICY,
    "Aggressive": aggressive.POLICY,
    "Random": random_mix.POLICY,
    "Otas": otas.POLICY,
    "PetsLike": pets.POLICY,
    "InfaasLike": infaas.POLICY,
}
"""By the names users know them by."""
