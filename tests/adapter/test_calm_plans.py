"""Plans on a machine whose speed drifts: few changes, none of them at the SLO's expense.

Noise of service times is replayed from a run of the bundled pipeline on two busy cores.
"""

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

SECONDS, DRIFT_SECONDS, MAX_CHANGES_PER_MINUTE, MAX_LOSS = 180, 60.0, 1.0, 0.02
BATCH_FACTORS = (0.47, 0.58, 0.64, 0.7, 0.75, 0.8, 0.84, 0.89, 0.94, 0.99, 1.05, 1.13, 1.2, 1.3, 1.46, 1.77)
"""Recorded seconds of batches over those expected at the machine's speed, equally likely."""
SPEEDS_PERCENT = (
    "91 104 97 95 89 75 97 118 114 102 124 80 92 93 81 115 76 99 91 106 111 142 99 135 152 123 89 55 71 51 "
    "70 53 96 117 139 139 142 129 103 108 159 101 60 51 74 92 104 95 84 73 89 85 109 93 117 106 127 126 112 102"
)
"""Recorded speed of the machine each half second, over its mean of ten seconds."""


def drifting_speed() -> MachineSpeed:
    """The recorded speeds, which also drift between 1 and a half, and back, within a minute."""
    seconds = [0.5 * step for step in range(4 * SECONDS)]
    drift = 2.0 ** (0.5 * (np.cos(2.0 * np.pi * np.array(seconds) / DRIFT_SECONDS) - 1.0))
    recorded = [float(percent) for percent in SPEEDS_PERCENT.split()]
    return MachineSpeed(tuple(seconds), tuple((drift * np.resize(recorded, len(seconds)) / 100.0).tolist()))


def run(rate_rps: float, fixed: PipelinePlan | None = None) -> SimulationResult:
    """Simulate a steady load, under a fixed plan or under the controller."""
    pipeline = a_ladder(adaptation={"interval": "5s", "forecaster": "Reactive"})
    random = np.random.default_rng(1)
    arrivals = np.sort(random.uniform(0, SECONDS, random.poisson(rate_rps * SECONDS)))
    variants = [(stage.name, variant.name) for stage in pipeline.spec.stages for variant in stage.variants]
    return simulate(
        Scenario(
            pipeline=pipeline,
            profiles=profiles_of(pipeline),
            arrivals_seconds=arrivals,
            duration_seconds=float(SECONDS),
            plan=fixed or plan_for(pipeline, 1.3 * rate_rps),
            controller=None if fixed else Controller(ReactiveForecaster()),
            environment=Environment(
                startup_seconds=2.0, speeds=(drifting_speed(),), factors=dict.fromkeys(variants, BATCH_FACTORS)
            ),
        )
    )


def shapes(result: SimulationResult) -> list[tuple[str, ...]]:
    return [tuple(map(describe_option, plan.spec.stages)) for plan in result.plans]


@pytest.mark.parametrize("rate_rps", [70.0])
def test_drifting_speed_changes_few_plans(figures: Figures, rate_rps: float) -> None:
    adapted = run(rate_rps)

    plans = dict(zip(shapes(adapted), adapted.plans, strict=True))
    best = max(1.0 - run(rate_rps, plan).violations for plan in plans.values())
    changes = sum(before != after for before, after in pairwise(shapes(adapted)))
    attainment, per_minute = 1.0 - adapted.violations, changes * 60 / SECONDS
    figures.require("plan changes per minute", per_minute, "<=", MAX_CHANGES_PER_MINUTE)
    figures.require("share in SLO below the best fixed plan's", best - attainment, "<=", MAX_LOSS)
