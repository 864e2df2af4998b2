"""A stage with two operating points, a load on it, and the orders in which a departure can be decided."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.builders import a_chain, a_pipeline, a_plan, a_point_profile, a_profile, a_variant
from trimtab_adapter.simulation.environment import Environment
from trimtab_adapter.simulation.result import SimulationResult
from trimtab_adapter.simulation.simulator import Scenario, simulate
from trimtab_pipelines.spec import InferencePipeline
from trimtab_router.scheduling.policies import earliest_deadline_first, slack_fit
from trimtab_router.scheduling.policies.interface import Dispatch, Point, Policy, SchedulerView, WaitUntil

ROWS = 8
SLO_SECONDS = 0.100
ACCURACIES = {"full": 0.9, "half": 0.8}
SECONDS = {"full": (0.040, 0.010), "half": (0.004, 0.002)}
"""Of a batch beside and per row: eight rows take 120 ms at full, more than the promise, and 20 ms at half."""
SHORT_SHARE = 0.8
"""Of the promise: with less left, the old order took the faster point."""
CARRIED_RPS = {name: max(n / (c + p * n) for n in range(1, ROWS + 1)) for name, (c, p) in SECONDS.items()}
"""Most rows a second at each point."""


def seconds_of(point: str, rows: int) -> float:
    """Seconds of a batch at a point."""
    constant, each = SECONDS[point]
    return constant + each * rows


def old_order(slower: float) -> Policy:
    """Fix rows and drops at the planned point, and only then take another point for them where time is short."""

    def decide(view: SchedulerView) -> Dispatch | WaitUntil:
        decision = earliest_deadline_first.decide(view)
        if isinstance(decision, Dispatch) and view.slack_of(decision.takes[0]) < SHORT_SHARE * slower * SLO_SECONDS:
            return replace(decision, point=half)
        return decision

    half = Point("half", ACCURACIES["half"], lambda rows: slower * seconds_of("half", rows))
    return Policy(decide)


def policy_of(order: str, slower: float = 1.0) -> Policy:
    """Who decides in an order."""
    return {OLD: old_order(slower), NEW: slack_fit.POLICY}.get(order, earliest_deadline_first.POLICY)


OLD, NEW = "rows and drops first, then the point", "one decision: slack_fit"
PLANNED, CHEAPER = "the planned point alone", "the cheaper point alone"
ORDERS = (OLD, PLANNED, CHEAPER, NEW)
SERVED = (OLD, PLANNED, NEW)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is served, and its plans: full and half to fall back to, or half alone; one replica."""

    pipeline: InferencePipeline
    planned: Mapping[str, Any]
    cheaper: Mapping[str, Any]

    @classmethod
    def of(cls, slower: float = 1.0) -> "Setting":
        """All of it so many times slower, the promise too."""
        points = [{"name": name, "accuracy": accuracy} for name, accuracy in ACCURACIES.items()]
        chain = a_chain(1)
        chain[0]["variants"] = [a_variant(operatingPoints=points)]
        pipeline = a_pipeline(chain, slo={"latency": slower * SLO_SECONDS}, schedulingPolicy="SlackFit")
        tables = {name: {n: slower * seconds_of(name, n) for n in (1, 2, 4, ROWS)} for name in SECONDS}
        half = {"name": "half", "accuracy": ACCURACIES["half"], "serviceSeconds": tables["half"]}
        planned = {"operatingPoint": "full", "serviceSeconds": tables["full"], "fallbacks": [half]}
        cheaper = {"operatingPoint": "half", "serviceSeconds": tables["half"], "accuracy": ACCURACIES["half"]}
        return cls(pipeline, planned, cheaper)


def arrivals(rate_rps: float, seconds: float) -> NDArray[np.float64]:
    """Poisson arrivals, the same for every order."""
    rng = np.random.default_rng(int(rate_rps))
    return np.sort(rng.uniform(0.0, seconds, rng.poisson(rate_rps * seconds)))


def simulated(order: str, rate_rps: float, seconds: float) -> SimulationResult:
    """Simulate a load under one order."""
    setting = Setting.of()
    measured = [
        a_point_profile("small", *law).model_copy(update={"operating_point": name}) for name, law in SECONDS.items()
    ]
    scenario = Scenario(
        pipeline=setting.pipeline,
        profiles={"stage-0": a_profile("stage-0", measured)},
        arrivals_seconds=arrivals(rate_rps, seconds),
        duration_seconds=seconds,
        plan=a_plan(setting.pipeline, **(setting.cheaper if order == CHEAPER else setting.planned)),
        conditions=Environment(spread=0.0),
        policy=policy_of(order),
    )
    return simulate(scenario)
