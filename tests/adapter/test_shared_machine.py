"""A plan heeds who else computes on the one machine that it is for."""

from dataclasses import replace
from functools import cache

import pytest

from tests.adapter.scenes import a_ladder, profiles_of
from tests.adapter.test_layouts import PROFILES, a_choosing_pipeline
from tests.router.layouts import WHOLE
from trimtab_adapter.control_state import ControlState
from trimtab_adapter.planning.decide import PlanningInputs, decide, planning_problem
from trimtab_adapter.planning.shared_machine import MachineLoad
from trimtab_pipelines.plan import ForecastRecord
from trimtab_pipelines.shared_capacity import Machine

TWO = {"cores": "2"}


def a_situation(
    rps: float, images: float = 0.0, others: float | None = None, cores: float = 2.0, seen_rps=None, **more
):
    machine = None if others is None else MachineLoad(Machine(cores=cores, other_cores=others), seen_rps or rps)
    rows = {"encode": images}
    return PlanningInputs(
        ForecastRecord(peak_rps=rps, source="reactive"), 0.0, rows_per_request=rows, machine=machine, **more
    )


def planned(rps: float, images: float = 0.0, others: float | None = None, budget=TWO, pin=None, **more):
    pipeline = a_choosing_pipeline(budget=budget, pin=pin)
    return decide(pipeline, PROFILES, a_situation(rps, images, others, **more)).spec


@cache
def most(images: float, cores: str) -> float:
    """The most that so many cores carry, requests a second."""
    low, high = 1.0, 2_000.0
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if planned(middle, images, budget={"cores": cores}).feasible else (low, middle)
    return low


def test_busy_router_core_prevents_a_second_replica():
    rps = 1.3 * most(0.0, "1")
    free, shared = planned(rps), planned(rps, others=1.0)

    assert free.stage("text").replicas == 2
    assert free.feasible
    assert shared.stage("text").replicas == 1
    assert "overload: 1 cores carry" in shared.reason
    assert "on 1 cores left by other processes on this machine" in shared.explanation.change


def test_second_replica_is_planned_if_it_adds_throughput():
    rps = 1.3 * most(1.0, "1")

    shared = planned(rps, 1.0, others=0.15)

    assert shared.feasible
    assert shared.stage("text").replicas == 2
    assert "for 1.41 times the load, because replicas share the machine's remaining cores" in shared.explanation.change


def test_what_a_core_carries_stays_on_it():
    calm = planned(0.6 * most(0.0, "1"), others=0.3)

    assert calm.feasible
    assert calm.stage("text").replicas == 1
    assert calm.stage("text").variant == WHOLE


@pytest.mark.parametrize("others", [0.0, 0.1])
def test_of_a_larger_budget_no_more_is_used_than_the_machine_has(others):
    rps = 1.5 * most(0.0, "2")

    assert planned(rps, budget={"cores": "8"}).stage("text").replicas > 2
    assert planned(rps, budget={"cores": "8"}, others=others).stage("text").replicas == 2


def test_where_all_of_the_budget_is_left_nothing_changes():
    rps = 1.3 * most(0.0, "1")

    assert planned(rps, others=1.0, cores=3.0) == planned(rps)


def test_usage_of_other_processes_is_extrapolated_within_a_limit():
    seen = MachineLoad(Machine(cores=4.0, other_cores=0.5), load_rps=10.0)

    assert [seen.at(rps).other_cores for rps in (5.0, 10.0, 15.0, 20.0, 200.0)] == [0.5, 0.5, 0.75, 1.0, 1.0]
    assert replace(seen, load_rps=0.0).at(5.0).other_cores == 1.0
    rps = 1.3 * most(0.0, "1")
    assert planned(rps, others=0.5, seen_rps=rps).stage("text").replicas == 2
    assert planned(rps, others=0.5, seen_rps=rps / 2).stage("text").replicas == 1


def test_pinned_sizes_and_other_pipelines_ignore_the_machine():
    pipeline = a_choosing_pipeline(budget=TWO, pin=WHOLE)
    stages = [
        stage.model_copy(update={"pin": stage.pin.model_copy(update={"replicas": 2})}) if stage.generates else stage
        for stage in pipeline.spec.stages
    ]
    fixed = pipeline.model_copy(update={"spec": pipeline.spec.model_copy(update={"stages": tuple(stages)})})
    assert decide(fixed, PROFILES, a_situation(10.0, others=1.9)).spec.stage("text").replicas == 2

    ladder = a_ladder()
    inputs = PlanningInputs(ForecastRecord(peak_rps=20.0, source="reactive"), 0.0)
    beside = replace(inputs, machine=MachineLoad(Machine(cores=2.0, other_cores=1.9), 20.0))
    assert planning_problem(ladder, profiles_of(ladder), beside) == planning_problem(
        ladder, profiles_of(ladder), inputs
    )


def test_an_slo_that_sharing_breaks_is_not_given_up_for_load():
    """A first piece comes in time on one core, and on two that are shared by more it would not."""
    rps = 1.8 * most(12.0, "1")

    shared = planned(rps, 12.0, others=1.0, pin=WHOLE)

    assert shared.stage("text").replicas == 1
    assert "overload" in shared.reason


def test_strain_is_eased_within_the_cores_that_are_left():
    rps = 0.95 * most(0.0, "1")

    strained = planned(rps, others=1.0, slowdown=4.0)

    assert strained.feasible
    assert strained.stage("text").replicas == 1


def test_machine_load_stays_without_new_reports():
    state, forecast = ControlState(), ForecastRecord(peak_rps=5.0, source="reactive")
    assert state.planning_inputs(forecast, None, 0.0, 60.0).machine is None

    reported = Machine(cores=2.0, other_cores=0.5)
    state.observe_machine(reported, 5.0)
    state.observe_machine(None, 9.0)

    assert state.planning_inputs(forecast, None, 0.0, 60.0).machine == MachineLoad(reported, 5.0)
