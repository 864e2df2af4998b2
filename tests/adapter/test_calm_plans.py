"""Plans under noise: few changes while a machine's speed drifts, and a change at once if a slowdown lasts."""

import math
from itertools import pairwise

import numpy as np
import pytest

from tests.adapter.scenes import a_ladder, plan_for, profiles_of
from tests.figures import Figures
from trimtab_adapter.controller import Controller
from trimtab_adapter.planning.explain import describe_option
from trimtab_adapter.simulation.environment import Environment, MachineSpeed
from trimtab_adapter.simulation.result import SimulationResult
from trimtab_adapter.simulation.simulator import Scenario, simulate
from trimtab_pipelines.plan import PipelinePlan
from trimtab_predictor.forecaster import ReactiveForecaster

SECONDS, MAX_CHANGES_PER_MINUTE, MAX_LOSS = 240, 1.0, 0.02
SLOW_AT_SECONDS = 60.0


def drift(period_seconds: int) -> MachineSpeed:
    """A speed between 1 and a half, and back, in a period."""
    seconds = range(2 * SECONDS)
    speeds = [2.0 ** (0.5 * (math.cos(2 * math.pi * second / period_seconds) - 1.0)) for second in seconds]
    return MachineSpeed(tuple(map(float, seconds)), tuple(speeds))


def run(rate_rps: float, speed: MachineSpeed, fixed: PipelinePlan | None = None) -> SimulationResult:
    """Simulate a steady load, under a fixed plan or under the controller."""
    pipeline = a_ladder(adaptation={"interval": "5s", "forecaster": "Reactive"})
    random = np.random.default_rng(1)
    arrivals = np.sort(random.uniform(0, SECONDS, random.poisson(rate_rps * SECONDS)))
    return simulate(
        Scenario(
            pipeline=pipeline,
            profiles=profiles_of(pipeline),
            arrivals_seconds=arrivals,
            duration_seconds=float(SECONDS),
            plan=fixed or plan_for(pipeline, 1.3 * rate_rps),
            controller=None if fixed else Controller(ReactiveForecaster()),
            environment=Environment(startup_seconds=2.0, speeds=(speed,)),
        )
    )


def shapes(result: SimulationResult) -> list[tuple[str, ...]]:
    return [tuple(map(describe_option, plan.spec.stages)) for plan in result.plans]


@pytest.mark.parametrize("period_seconds", [60, 120])
@pytest.mark.parametrize("rate_rps", [30.0, 70.0])
def test_drifting_speed_changes_few_plans(figures: Figures, rate_rps: float, period_seconds: int) -> None:
    speed = drift(period_seconds)
    adapted = run(rate_rps, speed)

    plans = dict(zip(shapes(adapted), adapted.plans, strict=True))
    best = max(1.0 - run(rate_rps, speed, plan).violations for plan in plans.values())
    changes = sum(before != after for before, after in pairwise(shapes(adapted)))
    attainment, per_minute = 1.0 - adapted.violations, changes * 60 / SECONDS
    figures.require("plan changes per minute", per_minute, "<=", MAX_CHANGES_PER_MINUTE)
    figures.require("share in SLO below the best fixed plan's", best - attainment, "<=", MAX_LOSS)


def test_lasting_slowdown_is_followed_at_once() -> None:
    """The plan before it would not carry the load of a machine that is four times as slow."""
    speed = MachineSpeed((0.0, SLOW_AT_SECONDS), (1.0, 0.25))
    adapted = run(55.0, speed)

    kept = run(55.0, speed, adapted.plans[10])
    changed = next(
        after.spec.created_at
        for before, after in pairwise(adapted.plans)
        if after.spec.created_at > SLOW_AT_SECONDS and after.spec.generation != before.spec.generation
    )
    assert kept.violations > 0.1
    assert changed <= SLOW_AT_SECONDS + 10.0
    settled = adapted.arrivals_seconds > SLOW_AT_SECONDS + 40.0
    assert float(np.mean(adapted.outcomes[settled] == 0)) > 0.98
