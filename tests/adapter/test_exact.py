"""The exact solver against brute force, and what must hold of any optimum."""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.adapter.problems import a_large_graph, a_large_program, a_program, brute_force, second_best
from trimtab_adapter.solvers.dominance import undominated
from trimtab_adapter.solvers.exact import WIDTHS, search, solve
from trimtab_adapter.solvers.program import Program, Solution, objective_weights
from trimtab_adapter.solvers.program_arrays import to_arrays
from trimtab_adapter.solvers.time_limit import time_limit
from trimtab_pipelines.spec import Objective


def searched(program: Program, widths: Sequence[int] = WIDTHS) -> Solution | None:
    """Solve by the search alone, however few choices there are."""
    table = to_arrays(program)
    return None if table is None else search(program, table, widths)


def assert_same_as_brute_force(program: Program) -> bool:
    expected = brute_force(program)

    for found in (solve(program), searched(program)):
        if expected is None:
            assert found is None
            continue
        assert found is not None
        assert found.gap == 0
        assert program.is_feasible(found.choice)
        assert found.objective == pytest.approx(program.objective(expected), abs=1e-9)
        assert found.objective == pytest.approx(program.objective(found.choice), abs=1e-9)
    return expected is not None


@pytest.mark.parametrize("block", range(10))
def test_equals_brute_force(block):
    """Thousands of chains and DAGs, all goals, both metrics, CPU and GPU, floors, penalties, infeasible ones."""
    feasible = [assert_same_as_brute_force(a_program(seed)) for seed in range(block * 300, block * 300 + 300)]

    assert 60 < sum(feasible) < 300


@pytest.mark.parametrize("width", [1, 2, 8, 30])
def test_gap_covers_labels_dropped_for_lack_of_room(width):
    unsure = 0
    for seed in range(60):
        program = a_large_graph(seed)
        best, found = searched(program), searched(program, widths=(width,))
        if best is not None and found is not None:
            assert best.gap == 0
            assert best.objective - found.objective <= found.gap + 1e-9
            unsure += found.gap > 0
    assert unsure > 0


@settings(max_examples=150, deadline=None)
@given(st.integers(1000, 10**9))
def test_equals_brute_force_on_any_seed(seed):
    assert_same_as_brute_force(a_program(seed))


def test_the_runner_up_is_the_best_plan_with_another_model():
    seen = 0
    for seed in range(300):
        program = a_program(seed)
        best = brute_force(program)
        if best is not None:
            seen += assert_same_as_brute_force(second_best(program, best))
    assert seen > 50


def test_more_budget_or_a_looser_slo_is_never_worse():
    for seed in range(200):
        program = a_program(seed)
        found = solve(program)
        for loosened in (
            replace(program, cores=program.cores * 1.3),
            replace(program, slo_seconds=program.slo_seconds * 1.3),
            replace(program, gpus=program.gpus + 2),
            replace(program, accuracy_floor=0.0),
        ):
            better = solve(loosened)
            if found is not None:
                assert better is not None
                assert better.objective >= found.objective - 1e-9


def test_a_stage_without_options_is_infeasible():
    program = a_program(1)
    empty = replace(program.stages[0], options=())

    assert solve(replace(program, stages=(empty, *program.stages[1:]))) is None


def test_no_slo_and_no_budget_are_allowed():
    program = replace(a_program(3), slo_seconds=float("inf"), cores=float("inf"), gpus=10**9, accuracy_floor=0.0)

    assert assert_same_as_brute_force(program)


@pytest.mark.parametrize("cores", [1e9, 60.0])
def test_ten_stages_of_ten_variants_are_solved_within_a_budget(cores):
    """Too large for brute force: the answer is feasible and improves when it is loosened."""
    for seed in range(3):
        program = a_large_program(seed, cores=cores)
        found = solve(program)
        if found is not None:
            assert program.is_feasible(found.choice)
            looser = solve(replace(program, slo_seconds=program.slo_seconds * 2))
            assert looser is not None
            assert looser.objective >= found.objective - 1e-9


def test_parallel_branches_take_the_slower_one():
    program = replace(a_program(0), slo_seconds=1.0)
    options = program.stages[0].options[:1]
    latency = options[0].latency_seconds
    fork = tuple(
        replace(program.stages[0], name=f"s{k}", predecessors=p, options=options)
        for k, p in enumerate(((), (0,), (0,), (1, 2)))
    )

    assert replace(program, stages=fork).latency_seconds(options * 4) == pytest.approx(3 * latency)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 400), st.integers(1, 4))
def test_undominated_keeps_exactly_the_front(seed, count, respects):
    costs = np.random.default_rng(seed).integers(0, 6, (count, respects)).astype(float)
    kept = {tuple(row) for row in costs[undominated(list(costs.T))]}
    rows = {tuple(row) for row in costs}

    def beaten(row):
        return any(other != row and all(a <= b for a, b in zip(other, row, strict=True)) for other in rows)

    assert kept == {row for row in rows if not beaten(row)}
    assert len(undominated(list(costs.T))) == len(kept)


@pytest.mark.parametrize(
    ("goal", "greater", "smaller"), [("MaxAccuracy", "accuracy", "core"), ("MinCost", "core", "accuracy")]
)
def test_a_goal_weighs_only_what_it_asks_for(goal, greater, smaller):
    weights = objective_weights(Objective(goal=goal, accuracy_floor=0.5))

    assert getattr(weights, smaller) <= 1e-6 * getattr(weights, greater)
    assert 0 < weights.batch < min(weights.core, weights.accuracy)


def test_solve_at_its_time_limit_reports_the_gap():
    """Compares with the same search without a time limit."""
    unsure = 0
    for seed in range(30):
        program = a_large_graph(seed, stages=16)
        best, hurried = solve(program), solve(program, time_limit_seconds=0.0)
        if best is not None and hurried is not None:
            assert program.is_feasible(hurried.choice)
            assert best.objective - hurried.objective <= hurried.gap + 1e-9
            unsure += hurried.gap > 0
            assert (hurried.gap > 0) == bool(hurried.note)
    assert unsure > 0


def test_one_decision_has_one_limit_however_often_it_solves():
    program = next(found for seed in range(30) if _is_hard(found := a_large_graph(seed, stages=16)))
    with time_limit(0.0), time_limit(60.0):
        hurried = solve(program)
    at_leisure = solve(program)

    assert hurried is not None
    assert re.fullmatch(r"stopped at the time limit; no plan is better by more than [\d.e-]+", hurried.note)
    assert at_leisure is not None
    assert not at_leisure.note


def _is_hard(program: Program) -> bool:
    hurried = solve(program, time_limit_seconds=0.0)
    return hurried is not None and hurried.gap > 0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_what_was_not_looked_at_in_time_stays(seed):
    costs = np.random.default_rng(seed).integers(0, 6, (400, 3)).astype(float)
    front = set(undominated(list(costs.T)).tolist())

    assert set(undominated(list(costs.T), expired=lambda: True).tolist()) == set(range(400)) > front
