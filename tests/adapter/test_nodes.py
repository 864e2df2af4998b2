"""Variants on CPU and on GPU beside each other: one profile each, one budget each, one plan."""

import pytest

from tests.adapter.scenes import expected
from tests.builders import a_chain, a_pipeline, a_point_profile, a_profile, a_variant
from trimtab_adapter.planning.decide import PlanningInputs, decide
from trimtab_pipelines.documents import dump_yaml, load_profiles
from trimtab_pipelines.plan import ForecastRecord

ON_CPU = a_profile("stage-0", [a_point_profile("cpu-small", 0.002, 0.010), a_point_profile("cpu-large", 0.010, 0.080)])
ON_GPU = a_profile("stage-0", [a_point_profile("gpu-large", 0.001, 0.001)])


def plan_with(gpus, profiles, load_rps=100.0):
    chain = a_chain(1)
    chain[0]["variants"] = [
        a_variant("cpu-small", accuracy=0.8),
        a_variant("cpu-large", accuracy=0.95),
        a_variant("gpu-large", accuracy=0.95, resources={"cpu": 1, "gpu": 1}, nodeSelector={"accelerator": "h200"}),
    ]
    pipeline = a_pipeline(chain, budget={"cores": "6", "gpus": gpus}, slo={"latency": "400ms"})
    return decide(pipeline, profiles, PlanningInputs(ForecastRecord(peak_rps=load_rps, source="given"), 0.0))


@pytest.fixture
def profiles(tmp_path):
    file = tmp_path / "profile.yaml"
    file.write_text(dump_yaml(ON_CPU, ON_GPU))
    return load_profiles(file)


def test_profiles_of_several_kinds_of_hardware_stand_together(profiles):
    assert {point.variant for point in profiles["stage-0"].spec.points} == {"cpu-small", "cpu-large", "gpu-large"}


def test_gpu_is_used_only_within_the_budget(profiles):
    without, with_one = plan_with(0, profiles), plan_with(1, profiles)

    assert without.spec.stages[0].variant == "cpu-small"
    assert expected(without).gpus == 0
    assert with_one.spec.stages[0].variant == "gpu-large"
    assert expected(with_one).gpus == 1
    assert without.spec.explanation.binding_constraint.startswith("budget.gpus: without it the objective would gain")


def test_a_load_beyond_the_gpus_goes_back_to_cpus(profiles):
    plan = plan_with(1, profiles, load_rps=5000.0)

    assert expected(plan).gpus <= 1
    assert plan.spec.planned_fraction < 1
