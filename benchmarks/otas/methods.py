"""Methods compared: ours, OTAS, the paper's baselines, and ours and OTAS's with one idea changed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.otas.paper import GAMMAS, MERGED, MODELS, PLAIN, PROMPTED, TABLE_RPS, Option, trained_with_merging
from benchmarks.papers.policies import infaas, otas, pets
from benchmarks.papers.policies.fixed import fixed
from trimtab_router.scheduling.policies import slack_fit, token_adaptive
from trimtab_router.scheduling.policies.interface import Point, Policy, SchedulerView


@dataclass(frozen=True, slots=True)
class Method:
    """A policy and what it may choose among.

    Attributes:
        policy: decides every departure.
        options: its points.
        evicts: whether who cannot make it any more is dropped.
        looks: whether second looks are offered.
    """

    policy: Policy
    options: Sequence[Option] = GAMMAS
    evicts: bool = True
    looks: bool = False

    @property
    def is_the_papers(self) -> bool:
        """Whether it has nothing to choose among but the paper's list."""
        return not self.looks and all(option in GAMMAS for option in self.options)


def by_table(view: SchedulerView, points: Sequence[Point]) -> Point:
    """The paper's table I."""
    name = next((name for most_rps, name in TABLE_RPS if view.arrivals_rps() <= most_rps), "-20")
    return next(point for point in points if point.name == f"g{name}")


def _at(name: str) -> Method:
    option = next(option for option in GAMMAS if option.name == name)
    return Method(fixed(f"g{name}"), [option])


def _policy(policy: Policy, **changes: object) -> Policy:
    return Policy(partial(policy.decide, **changes), uses_fallbacks=True)


_PLAIN = [option for option in GAMMAS if option.name == PLAIN]
_STRONG = [option for option in GAMMAS if option.rps >= 1000.0]
AWARE = [*GAMMAS, *(trained_with_merging(option, _PLAIN[0]) for option in _STRONG)]
"""The paper's list, and its two strongest numbers with prompts that knew of the merging."""
OURS, OTAS, TOME, VPT = "TokenAdaptive", "OTAS", "ToMe −15", "VPT 2"
PETS, PETS_EVICTS, INFAAS = "PetS-like", "PetS-like, evicting", "INFaaS-like"
EXACT, MYOPIC, WHOLE, LOOKS = "OTAS, exact solver", "ours, λ = 0", "ours, fixed batches", "ours, second looks"
PROMPTS = "ours, merge-aware prompts"
METHODS = {
    OURS: Method(token_adaptive.POLICY),
    OTAS: Method(_policy(otas.POLICY, table=by_table)),
    PETS: Method(pets.POLICY, _PLAIN, evicts=False),
    PETS_EVICTS: Method(pets.POLICY, _PLAIN),
    INFAAS: Method(infaas.POLICY, MODELS),
    TOME: _at(MERGED),
    VPT: _at(PROMPTED),
    "SlackFit": Method(slack_fit.POLICY),
    EXACT: Method(_policy(otas.POLICY, table=by_table, program=otas.by_exact_program)),
    MYOPIC: Method(_policy(token_adaptive.POLICY, uses_shadow_price=False)),
    WHOLE: Method(_policy(token_adaptive.POLICY, joins_batches=False)),
    LOOKS: Method(token_adaptive.POLICY, looks=True),
    PROMPTS: Method(token_adaptive.POLICY, AWARE),
}
"""By the names the page has for them; ours first."""
