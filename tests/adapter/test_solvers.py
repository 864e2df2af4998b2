"""Solvers and their bounds against brute force and against each other, and the fallback to the exact one."""

import functools
import itertools
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.adapter.problems import a_large_graph, a_large_program, a_program, brute_force, search, second_best
from tests.adapter.scenes import a_ladder, plan_for
from trimtab_adapter.planning.relaxation import solve
from trimtab_adapter.solvers import exact, gurobi, highs
from trimtab_adapter.solvers.dominance import undominated
from trimtab_adapter.solvers.lagrangian_bound import LagrangianBounds, optimize_multipliers
from trimtab_adapter.solvers.milp import build_milp
from trimtab_adapter.solvers.program import Program, Solver, SolverUnavailable, objective_weights
from trimtab_adapter.solvers.program_arrays import Labels, ProgramArrays, Resource, to_arrays
from trimtab_adapter.solvers.resource_bound import ResourceBound, resource_bound
from trimtab_adapter.solvers.time_limit import time_limit
from trimtab_pipelines.spec import Objective

PATIENCE_SECONDS = 120.0  # a busy machine must not make a proof look like a gap
PATIENT: dict[str, Solver] = {
    "Exact": exact.solve,
    "search": search,
    "HiGHS": functools.partial(highs.solve, time_limit_seconds=PATIENCE_SECONDS),
    "Gurobi": functools.partial(gurobi.solve, time_limit_seconds=PATIENCE_SECONDS),
}
OTHERS = ["HiGHS", "Gurobi"]


def require(name: str) -> Solver:
    """A patient solver; skip the test if it is not installed or not licensed."""
    try:
        PATIENT[name](a_program(0))
    except SolverUnavailable as reason:
        pytest.skip(str(reason))
    return PATIENT[name]


@pytest.fixture(params=PATIENT)
def solver(request):
    return require(request.param)


def assert_optimal(program: Program, solver: Solver, expected_objective: float | None) -> bool:
    """Compare with a known optimum; return whether the program is feasible."""
    found = solver(program)

    if expected_objective is None:
        assert found is None
        return False
    assert found is not None
    assert program.is_feasible(found.choice)
    assert found.objective == pytest.approx(expected_objective, abs=1e-7)
    assert found.objective == pytest.approx(program.objective(found.choice), abs=1e-7)
    assert found.gap <= 1e-6
    return True


def assert_same_as_brute_force(program: Program, solver: Solver) -> bool:
    best = brute_force(program)
    return assert_optimal(program, solver, None if best is None else program.objective(best))


@pytest.mark.parametrize(("name", "seeds"), [("Exact", 3000), ("search", 3000), ("HiGHS", 450), ("Gurobi", 450)])
def test_solver_equals_brute_force(name, seeds):
    """Chains and DAGs, all goals, both metrics, budgets, flavors, floors, penalties, infeasible ones."""
    solver = require(name)
    feasible = sum(assert_same_as_brute_force(a_program(seed), solver) for seed in range(seeds))

    assert 0.2 * seeds < feasible < seeds


def test_runner_up_is_the_best_plan_with_another_model(solver):
    feasible = 0
    for seed in range(150):
        program = a_program(seed)
        best = brute_force(program)
        if best is not None:
            feasible += assert_same_as_brute_force(second_best(program, best), solver)
    assert feasible > 25


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("seed", range(4))
def test_solvers_agree_beyond_brute_force(name, seed):
    solver = require(name)
    for program in (
        a_large_program(seed, 3, 5),
        a_large_program(seed, 6, 6, cores=40.0),
        a_large_graph(seed),
        a_large_graph(seed, stages=10),
    ):
        found = exact.solve(program)
        assert found is None or found.gap == 0
        assert_optimal(program, solver, None if found is None else found.objective)


def test_no_slo_and_no_budget_are_allowed(solver):
    program = replace(
        a_program(3), slo_seconds=float("inf"), cores=float("inf"), gpus=10**9, accuracy_floor=0.0, cost=float("inf")
    )

    assert assert_same_as_brute_force(program, solver)


def test_stage_without_options_is_infeasible(solver):
    program = a_program(1)
    empty = replace(program.stages[0], options=())

    assert solver(replace(program, stages=(empty, *program.stages[1:]))) is None


@pytest.mark.parametrize("width", [1, 2, 8, 30])
def test_gap_covers_labels_dropped_for_lack_of_room(width):
    unsure = 0
    for seed in range(60):
        program = a_large_graph(seed)
        best, found = search(program), search(program, widths=(width,))
        if best is not None and found is not None:
            assert best.gap == 0
            assert best.objective - found.objective <= found.gap + 1e-9
            unsure += found.gap > 0
    assert unsure > 0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 400), st.integers(1, 4))
def test_undominated_keeps_exactly_the_front(seed, count, criteria):
    costs = np.random.default_rng(seed).integers(0, 6, (count, criteria)).astype(float)
    kept = {tuple(row) for row in costs[undominated(list(costs.T))]}
    rows = {tuple(row) for row in costs}

    def beaten(row):
        return any(other != row and all(a <= b for a, b in zip(other, row, strict=True)) for other in rows)

    assert kept == {row for row in rows if not beaten(row)}
    assert len(undominated(list(costs.T))) == len(kept)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_candidates_not_examined_in_time_stay(seed):
    costs = np.random.default_rng(seed).integers(0, 6, (400, 3)).astype(float)
    front = set(undominated(list(costs.T)).tolist())

    assert set(undominated(list(costs.T), expired=lambda: True).tolist()) == set(range(400)) > front


@pytest.mark.parametrize(
    ("goal", "greater", "smaller"), [("MaxAccuracy", "accuracy", "cost"), ("MinCost", "cost", "accuracy")]
)
def test_goal_weighs_only_what_it_asks_for(goal, greater, smaller):
    weights = objective_weights(Objective(goal=goal, accuracy_floor=0.5))

    assert getattr(weights, smaller) <= 1e-6 * getattr(weights, greater)
    assert 0 < weights.batch < min(weights.cost, weights.accuracy)


def test_solve_at_its_time_limit_reports_the_gap():
    unsure = 0
    for seed in range(30):
        program = a_large_graph(seed, stages=16)
        best, hurried = exact.solve(program), exact.solve(program, time_limit_seconds=0.0)
        if best is not None and hurried is not None:
            assert program.is_feasible(hurried.choice)
            assert best.objective - hurried.objective <= hurried.gap + 1e-9
            unsure += hurried.gap > 0
            assert (hurried.gap > 0) == bool(hurried.note)
    assert unsure > 0


def test_solves_of_one_decision_share_its_time_limit():
    def is_hard(program: Program) -> bool:
        hurried = exact.solve(program, time_limit_seconds=0.0)
        return hurried is not None and hurried.gap > 0

    program = next(filter(is_hard, (a_large_graph(seed, stages=16) for seed in range(30))))
    with time_limit(0.0), time_limit(60.0):
        hurried = exact.solve(program)
    unhurried = exact.solve(program)

    assert hurried is not None
    assert re.fullmatch(r"stopped at the time limit; no plan is better by more than [\d.e-]+", hurried.note)
    assert unhurried is not None
    assert not unhurried.note


def test_linear_form_is_small():
    """One binary per undominated option and one column per distinct accuracy fit into Gurobi's free licence."""
    program = a_large_program(0, 20, 20)
    arrays = to_arrays(program)
    assert arrays is not None
    built = build_milp(program, arrays)

    assert built.binaries == sum(column.index.size for column in arrays.columns) < 1000
    assert len(built.objective) < 2000
    assert len(built.rows.entries) < 2000


def test_program_beyond_gurobis_licence_is_solved_by_exact():
    require("Gurobi")
    found = solve(a_large_program(0, 60, 30), "Gurobi")

    assert found is not None
    if found.solver == "Exact":  # else a full licence
        assert "free licence allows 2000 columns and 2000 rows; this program has" in found.note


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("HiGHS", "highspy", "solvers"), ("Gurobi", "gurobipy", "gurobi")]
)
def test_missing_solver_falls_back_to_exact_with_a_note(monkeypatch, name, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    plan = plan_for(a_ladder(adaptation={"solver": name}), 20.0)

    assert plan.spec.explanation.solver.startswith(
        f"Exact ({name} is not installed: pip install '.[{extra}]' in a clone"
    )
    assert plan.spec.stages == plan_for(a_ladder(), 20.0).spec.stages


@pytest.mark.parametrize("name", ["Exact", *OTHERS])
def test_pipeline_chooses_its_solver(name):
    require(name)
    plan = plan_for(a_ladder(adaptation={"solver": name}), 20.0)
    overload = plan_for(a_ladder(budget={"cores": "2"}, adaptation={"solver": name}), 5000.0)

    assert plan.spec.explanation.solver == name
    assert plan.spec.explanation.gap <= 1e-6
    assert plan.spec.stages == plan_for(a_ladder(), 20.0).spec.stages
    assert overload.spec.reason.startswith("overload: 2 cores carry")


def counted(program: Program, table: ProgramArrays) -> list[tuple[Resource, ...]]:
    """One or two constraints of a program."""
    limits: list[Resource] = [*range(len(table.limits))]
    if program.accuracy_floor:
        limits.append("floor")
    return [("second",), *((each,) for each in limits), *(("second", each) for each in limits)]


def labels_of(program: Program, table: ProgramArrays, picks: np.ndarray) -> Labels:
    """The partial choices of these options, of shape [labels, stages so far]."""
    chosen = list(zip(table.columns, picks.T, table.flow, strict=False))
    nothing = np.zeros(len(picks))
    values = [column.value[pick] for column, pick, _ in chosen]
    return Labels(
        value=np.prod(values, axis=0) if table.is_product else np.sum(values, axis=0),
        cost=np.sum([column.cost[pick] for column, pick, _ in chosen], axis=0),
        uses=np.sum([column.uses[:, pick] for column, pick, _ in chosen], axis=0),
        flow_seconds=np.sum([share * column.seconds[pick] for column, pick, share in chosen], axis=0),
        same=nothing.astype(np.bool_),
        disaggregated=np.full(len(picks), -1, dtype=np.int8),
        finish=np.zeros((0, len(picks))),
        parent=nothing.astype(np.intp),
        option=nothing.astype(np.intp),
    )


def feasible_choices(program: Program, table: ProgramArrays) -> tuple[np.ndarray, np.ndarray]:
    """All choices within the constraints, of shape [choices, stages], and what they reach."""
    picks, objectives = [], []
    for pick in itertools.product(*(range(column.index.size) for column in table.columns)):
        choice = [
            stage.options[column.index[n]] for stage, column, n in zip(program.stages, table.columns, pick, strict=True)
        ]
        if program.is_feasible(choice):
            picks.append(pick)
            objectives.append(program.objective(choice))
    return np.array(picks, dtype=np.intp), np.array(objectives)


def test_no_completion_reaches_more_than_was_promised():
    promised = 0
    for seed in range(400):
        program = a_program(seed)
        table = to_arrays(program)
        picks, objectives = feasible_choices(program, table) if table is not None else (np.empty(0), np.empty(0))
        if table is None or not picks.size:
            continue
        envelopes = optimize_multipliers(program, table).bounds
        bounds: list[LagrangianBounds | ResourceBound] = [
            *envelopes,
            *(resource_bound(program, table, envelopes[0].prices, resources) for resources in counted(program, table)),
        ]
        for stages in range(1, len(table.columns) + 1):
            labels = labels_of(program, table, picks[:, :stages])
            for bound in bounds:
                assert (bound.bound(stages, labels) >= objectives - 1e-9).all(), (seed, stages)
                promised += len(picks)
    assert promised > 10_000
