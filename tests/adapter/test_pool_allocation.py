"""Pipelines on one pool: the joint plan is the best there is, keeps the pool, and beats every fixed split."""

import itertools
from dataclasses import replace

import pytest

from tests.adapter.problems import a_large_program, a_program, brute_force
from tests.adapter.scenes import a_ladder, expected, plan_together, profiles_of, solve_together
from trimtab_adapter.planning.decide import initial_inputs
from trimtab_adapter.planning.planning_problem import PlanningProblem
from trimtab_adapter.planning.pool_allocation import PlanRequest, frontier
from trimtab_adapter.planning.program_builder import build_program
from trimtab_adapter.solvers.time_limit import time_limit
from trimtab_pipelines.documents import DocumentError, load_pools
from trimtab_pipelines.spec import Pool


def a_member(load_rps, **changes):
    pipeline = a_ladder(**({"budget": {"cores": "16", "pool": "shared"}} | changes))
    return PlanRequest(pipeline, profiles_of(pipeline), initial_inputs(load_rps))


def problems(*loads, **changes):
    members = {f"p{n}": a_member(load, **changes) for n, load in enumerate(loads)}
    return {
        name: PlanningProblem(m.pipeline.spec, m.profiles, m.planning_inputs.forecast.peak_rps)
        for name, m in members.items()
    }


def total(solutions):
    return sum(answer.solution.objective for answer in solutions.values())


def best_within(points, cores: float, gpus: int):
    fitting = [point for point in points if point.cores <= cores + 1e-9 and point.gpus <= gpus]
    return max(fitting, key=lambda point: point.objective, default=None)


def test_levels_are_the_best_choices_of_every_budget():
    several = 0
    for seed in range(150):
        program = a_program(seed)
        points = frontier(program)
        several += len(points) > 2
        for share_of, gpus in itertools.product((0.3, 0.6, 0.9, 1.0), (0, 2, program.gpus)):
            less = replace(program, cores=program.cores * share_of, gpus=min(gpus, program.gpus))
            best, found = brute_force(less), best_within(points, less.cores, less.gpus)
            assert (best is None) == (found is None)
            if best is not None and found is not None:
                assert found.objective == pytest.approx(program.objective(best), abs=1e-9)
    assert several > 20


@pytest.mark.parametrize("cores", [5.0, 8.0, 12.0])
def test_joint_plan_is_the_best_split_within_the_pool(cores):
    asked = problems(120.0, 40.0, objective={"accuracyWeight": 20})
    solutions = solve_together(Pool(cores=cores), asked)
    used = sum(option.cores for answer in solutions.values() for option in answer.solution.choice)
    frontiers = [frontier(replace(build_program(problem), cores=cores)) for problem in asked.values()]
    pairs = [(a, b) for a, b in itertools.product(*frontiers) if a.cores + b.cores <= cores + 1e-9]

    assert used <= cores + 1e-9
    assert total(solutions) == pytest.approx(max(a.objective + b.objective for a, b in pairs), abs=1e-9)


def test_plans_of_a_pool_name_it_as_what_binds():
    members = {"one": a_member(300.0), "other": a_member(200.0)}
    plans = plan_together("shared", Pool(cores=5.0), members)

    assert sum(expected(plan).cores for plan in plans.values()) <= 5.0
    assert all(plan.spec.feasible for plan in plans.values())
    assert any("cores of pool shared" in plan.spec.explanation.binding_constraint for plan in plans.values())


def test_an_overloaded_pool_carries_the_same_share_of_every_load():
    members = {"one": a_member(4000.0), "other": a_member(2000.0)}
    plans = plan_together("shared", Pool(cores=6.0), members)
    fractions = [plan.spec.planned_fraction for plan in plans.values()]

    assert sum(expected(plan).cores for plan in plans.values()) <= 6.0
    assert fractions[0] == fractions[1]
    assert 0.1 < fractions[0] < 0.9
    assert all(plan.spec.reason.startswith("overload: pool shared, 6 cores, carries") for plan in plans.values())


def test_gpus_of_a_pool_go_where_they_are_worth_most():
    gpu = {"resources": {"gpu": 1}}
    budget = {"cores": "16", "gpus": 8, "pool": "shared"}
    free = [{"name": "default", "prices": {"device": 0}}]
    heavy = a_member(60.0, variant=gpu, budget=budget, flavors=free, objective={"accuracyWeight": 50})
    light = a_member(60.0, variant=gpu, budget=budget, flavors=free, objective={"accuracyWeight": 1})
    plans = plan_together("shared", Pool(cores=16.0, gpus=5), {"heavy": heavy, "light": light})
    gpus = {name: expected(plan).gpus for name, plan in plans.items()}

    assert gpus == {"heavy": 3, "light": 2}
    assert expected(plans["heavy"]).accuracy > expected(plans["light"]).accuracy


@pytest.mark.parametrize(
    "greedy", [{"objective": {"accuracyWeight": 1e9}}, {"objective": {"accuracyWeight": 1e9, "costWeight": 1e7}}]
)
def test_no_weight_takes_the_whole_pool(greedy):
    """Unbounded, the greedy one's last hundredth of accuracy would be worth more than all the other could gain."""
    modest = a_member(60.0, objective={"accuracyWeight": 40})
    members = {"greedy": a_member(60.0, **greedy), "modest": modest}
    bounded = plan_together("shared", Pool(cores=7.0, max_gain=2.0), members)
    unbounded = plan_together("shared", Pool(cores=7.0, max_gain=1e12), members)

    assert expected(bounded["modest"]).cores > expected(unbounded["modest"]).cores


def test_pools_are_read_from_a_file(tmp_path):
    file = tmp_path / "pools.yaml"
    file.write_text("pools:\n  shared: {cores: 1500m, gpus: 2}\n")
    assert load_pools(file).pools == {"shared": Pool(cores=1.5, gpus=2)}
    file.write_text("pools:\n  shared: {cores: 2, namespaces: [team-a], maxGain: 5}\n")
    assert load_pools(file).pools == {"shared": Pool(cores=2, namespaces=("team-a",), max_gain=5.0)}

    file.write_text("pools:\n  shared: {cores: 0}\n")
    with pytest.raises(DocumentError, match=r"pools\.shared\.cores"):
        load_pools(file)


def test_coarse_steps_reach_from_best_to_cheapest_plan():
    shorter = 0
    programs = [
        *map(a_program, range(60)),
        *(a_large_program(seed, 6, 5, cores=60.0, slo_share=0.6) for seed in range(3)),
    ]
    for program in programs:
        fine = frontier(program)
        with time_limit(0.0):
            coarse = frontier(program)
        assert bool(fine) == bool(coarse)
        if fine:
            assert coarse[-1].objective == pytest.approx(fine[-1].objective)
            assert coarse[0].cores == pytest.approx(min(level.cores for level in fine if level.gpus == coarse[0].gpus))
            assert all(program.is_feasible(level.choice) for level in coarse)
            assert all(level.objective == pytest.approx(program.objective(level.choice)) for level in coarse)
            shorter += len(coarse) < len(fine)
    assert shorter > 2
