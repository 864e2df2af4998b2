"""Sensitivity of a plan: the cost of the next step, and what-if plans."""

import itertools
from dataclasses import replace

import pytest

from tests.adapter.problems import a_program, brute_force
from tests.adapter.scenes import a_ladder, profiles_of
from trimtab_adapter.planning.explain import binding_constraint
from trimtab_adapter.planning.planning_problem import PlanningProblem
from trimtab_adapter.planning.relaxation import PlanSolution
from trimtab_adapter.planning.sensitivity import estimate, sensitivities
from trimtab_adapter.planning.what_if import WhatIfError, solve_alternatives
from trimtab_adapter.solvers.exact import solve
from trimtab_adapter.solvers.program import Option, Program, StageOptions, Weights


def a_question(load_rps=60.0, **changes):
    pipeline = a_ladder(3, **({"budget": {"cores": "8"}, "slo": {"latency": "600ms"}} | changes))
    return PlanningProblem(pipeline.spec, profiles_of(pipeline), load_rps)


def answered():
    for seed in range(120):
        program = a_program(seed)
        solution = solve(program)
        if solution is not None:
            yield PlanSolution(program, solution)


def test_sensitivities_match_brute_force():
    for found in answered():
        program = found.program
        now = estimate(program, found.solution.choice)
        asked = {sensitivity.change: sensitivity.estimate for sensitivity in sensitivities(found)}
        changed = {
            "latency −1 ms": replace(program, slo_seconds=now.latency_seconds - 0.001),
            "1 core less": replace(program, cores=now.cores - 1),
            "budget +1 core": replace(program, cores=program.cores + 1),
        }
        for what, other in changed.items():
            best, priced = brute_force(other), asked[what]
            assert (best is None) == (priced is None)
            if best is not None and priced is not None:
                assert program.objective(priced.choice) == pytest.approx(program.objective(best), abs=1e-9)


def test_a_point_of_accuracy_is_bought_at_the_lowest_cost():
    bought = 0
    for found in answered():
        wanted = estimate(found.program, found.solution.choice).accuracy + 0.01
        price = next(price for price in sensitivities(found) if price.change == "accuracy +0.01")
        free = replace(found.program, accuracy_floor=0.0, cores=float("inf"), cost=float("inf"))
        choices = filter(free.is_feasible, itertools.product(*(stage.options for stage in free.stages)))
        estimates = [estimate(free, choice) for choice in choices]
        lowest = min((each.cost_per_hour for each in estimates if each.accuracy >= wanted - 1e-9), default=None)
        bought += lowest is not None
        cost = price.estimate and price.estimate.cost_per_hour
        assert price.reason if lowest is None else cost == pytest.approx(lowest)
    assert bought > 10


def test_alternatives_are_crossed_and_multiplied():
    found = solve_alternatives(a_question(), "load=x0.5/120,slo=300ms,budget=12")

    assert [alternative.name for alternative in found] == [
        "load=x0.5 slo=300ms budget=12",
        "load=120 slo=300ms budget=12",
    ]
    half, double = (alternative.problem for alternative in found)
    assert (half.load_rps, double.load_rps) == (30.0, 120.0)
    assert {q.spec.slo.latency_seconds for q in (half, double)} == {0.3}
    assert all(alternative.solution is not None and alternative.solution.feasible for alternative in found)
    assert all(a.solution.program.cores == 12.0 for a in found if a.solution)


def test_an_alternative_without_any_plan_says_why():
    (found,) = solve_alternatives(a_question(), "budget=2")

    assert found.solution is None
    assert found.reason.startswith("no plan fits budget.cores 2")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("lod=3", r"parameters: load, slo, budget, gpus, cost"),
        ("load", r"for example load=40/80,slo=200ms"),
        ("slo=soon", r"--what-if slo=soon: 'soon' is not a duration"),
        ("load=0", r"load must be above 0"),
        ("load=1,load=2", r"give load once; separate several values with /"),
    ],
)
def test_what_cannot_be_read_is_named(asked, message):
    with pytest.raises(WhatIfError, match=message):
        solve_alternatives(a_question(), asked)


@pytest.mark.parametrize(
    ("variant", "accuracy", "binding"),
    [
        ("heavy", 0.9, "slo.latency: without it the objective would gain 2"),
        ("light", 0.7, "none: no looser limit would allow a better plan"),  # only a smaller batch
    ],
)
def test_slo_binds_if_it_forbids_a_better_model(variant, accuracy, binding):
    """Within 0.2 s batches of eight are served; the other option takes half a second."""
    fast = Option("light", "default", 8, 1, 1.0, 0, 1.0, 0.7, 0.7, 0.1, 100.0)
    slow = Option(variant, "default", 1, 1, 1.0, 0, 1.0, accuracy, accuracy, 0.5, 100.0)
    program = Program((StageOptions("only", (), (fast, slow)),), 0.2, 8.0, 0, "Product", Weights(10.0, 0.5, 1e-6))
    solution = solve(program)

    assert solution is not None
    assert solution.choice == (fast,)
    assert binding_constraint(PlanSolution(program, solution)) == binding
