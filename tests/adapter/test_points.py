"""A load whose most urgent rows only the cheaper of two operating points can meet, and who answers it."""

from dataclasses import replace

import numpy as np
import pytest

from tests.builders import a_chain, a_pipeline, a_plan, a_point_profile, a_profile, a_variant
from trimtab_adapter.simulation.environment import Environment
from trimtab_adapter.simulation.simulator import Scenario, simulate
from trimtab_pipelines.request_outcome import DROPPED, OK

ACCURACIES = {"full": 0.9, "half": 0.8}
SECONDS = {"full": (0.040, 0.010), "half": (0.004, 0.002)}


def a_scenario(rate_rps, seconds=20, **changes):
    """One stage: eight rows take 120 ms at full, 20 ms at half; every answer is due after 100 ms."""
    chain = a_chain(1)
    chain[0]["variants"] = [
        a_variant(operatingPoints=[{"name": name, "accuracy": a} for name, a in ACCURACIES.items()])
    ]
    pipeline = a_pipeline(chain, **{"slo": {"latency": "100ms"}} | changes)
    points = [
        a_point_profile("small", *seconds).model_copy(update={"operating_point": name})
        for name, seconds in SECONDS.items()
    ]
    tables = [{str(b): constant + linear * b for b in (1, 2, 4, 8)} for constant, linear in SECONDS.values()]
    half = {"name": "half", "accuracy": 0.8, "serviceSeconds": tables[1]}
    plan = a_plan(pipeline, operatingPoint="full", serviceSeconds=tables[0], fallbacks=[half])
    rng = np.random.default_rng(0)
    return Scenario(
        pipeline=pipeline,
        profiles={"stage-0": a_profile("stage-0", points)},
        arrivals_seconds=np.sort(rng.uniform(0, seconds, rng.poisson(rate_rps * seconds))),
        duration_seconds=seconds,
        plan=plan,
        environment=Environment(spread=0.0),
    )


@pytest.mark.parametrize("rate_rps", [30.0, 60.0, 100.0, 150.0, 200.0, 300.0])
def test_no_row_is_dropped_for_accuracy_if_a_cheaper_point_fits(rate_rps):
    """At most 66 rows a second at full, 400 at half."""
    found = simulate(a_scenario(rate_rps, schedulingPolicy="SlackFit"))

    assert found.share(DROPPED) == 0.0
    assert found.share(OK) > 0.999
    assert found.mean_accuracy < 0.9


def test_a_better_point_than_planned_answers_while_there_is_time():
    calm = a_scenario(5.0, schedulingPolicy="SlackFit")
    half, full = calm.plan.spec.stages[0].fallbacks[0], calm.plan.spec.stages[0].planned
    cheap = calm.plan.spec.stages[0].model_copy(
        update={
            "operating_point": half.name,
            "accuracy": half.accuracy,
            "service_seconds": half.service_seconds,
            "upgrades": (full,),
            "fallbacks": (),
        }
    )
    plan = calm.plan.model_copy(update={"spec": calm.plan.spec.model_copy(update={"stages": (cheap,)})})
    found = simulate(replace(calm, plan=plan))

    assert found.share(OK) == 1.0
    assert found.mean_accuracy > 0.85


def test_by_the_planned_point_alone_fallbacks_change_nothing():
    scenario = a_scenario(150.0)
    alone = a_plan(
        scenario.pipeline, operatingPoint="full", serviceSeconds=scenario.plan.spec.stages[0].service_seconds
    )
    with_fallbacks, without = simulate(scenario), simulate(replace(scenario, plan=alone))

    assert with_fallbacks.share(DROPPED) > 0.3
    np.testing.assert_array_equal(with_fallbacks.latency_seconds, without.latency_seconds)
