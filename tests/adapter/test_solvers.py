"""HiGHS and Gurobi against brute force and the exact solver, and what happens where one cannot answer."""

import functools
import sys
from dataclasses import replace

import pytest

from tests.adapter.problems import a_large_graph, a_large_program, a_program, brute_force, second_best
from tests.adapter.scenes import a_ladder, plan_for
from trimtab_adapter.planning.relaxation import solve
from trimtab_adapter.solvers import exact, gurobi, highs
from trimtab_adapter.solvers.milp import MilpModel, Rows, build_milp
from trimtab_adapter.solvers.program import Program, Solver, SolverUnavailable
from trimtab_adapter.solvers.program_arrays import to_arrays

PATIENCE_SECONDS = 120.0  # a busy machine must not make a proof look like a gap


PATIENT: dict[str, Solver] = {
    "HiGHS": functools.partial(highs.solve, time_limit_seconds=PATIENCE_SECONDS),
    "Gurobi": functools.partial(gurobi.solve, time_limit_seconds=PATIENCE_SECONDS),
}


def require(name: str) -> Solver:
    """A patient solver; the test is skipped where it is not installed or not licensed."""
    try:
        PATIENT[name](a_program(0))
    except SolverUnavailable as reason:
        pytest.skip(str(reason))
    return PATIENT[name]


@pytest.fixture(params=["HiGHS", "Gurobi"])
def solver(request):
    return require(request.param)


def assert_same(program: Program, solver: Solver, expected_objective: float | None) -> bool:
    found = solver(program)

    if expected_objective is None:
        assert found is None
        return False
    assert found is not None
    assert program.is_feasible(found.choice)
    assert found.objective == pytest.approx(expected_objective, abs=1e-7)
    assert found.gap <= 1e-6
    return True


@pytest.mark.parametrize("block", range(3))
def test_equals_brute_force(solver, block):
    feasible = 0
    for seed in range(20_000 + block * 150, 20_150 + block * 150):
        program = a_program(seed)
        best = brute_force(program)
        feasible += assert_same(program, solver, None if best is None else program.objective(best))
    assert 30 < feasible < 150


def test_the_runner_up_is_the_same_for_all(solver):
    for seed in range(100):
        program = a_program(seed)
        best = brute_force(program)
        if best is not None:
            asked = second_best(program, best)
            second = brute_force(asked)
            assert_same(asked, solver, None if second is None else program.objective(second))


@pytest.mark.parametrize("seed", range(4))
def test_solvers_agree_where_brute_force_is_infeasible(solver, seed):
    for program in (
        a_large_program(seed, 3, 5),
        a_large_program(seed, 6, 6, cores=40.0),
        a_large_graph(seed),
        a_large_graph(seed, stages=10),
    ):
        found = exact.solve(program)
        assert found is None or found.gap == 0
        assert_same(program, solver, None if found is None else found.objective)


def test_no_slo_and_no_budget_are_allowed(solver):
    program = replace(a_program(3), slo_seconds=float("inf"), cores=float("inf"), gpus=10**9, accuracy_floor=0.0)
    best = brute_force(program)
    assert best is not None

    assert assert_same(program, solver, program.objective(best))


def test_a_stage_without_options_is_infeasible(solver):
    program = a_program(1)
    empty = replace(program.stages[0], options=())

    assert solver(replace(program, stages=(empty, *program.stages[1:]))) is None


def test_the_linear_form_is_small():
    """One binary an undominated option and one column a distinct accuracy: a free licence goes far with that."""
    program = a_large_program(0, 20, 20)
    table = to_arrays(program)
    assert table is not None
    built = build_milp(program, table)

    assert built.binaries == sum(column.index.size for column in table.columns) < 1000
    assert len(built.objective) < 2000
    assert len(built.rows.entries) < 2000


def test_gurobi_says_what_its_free_licence_prevents():
    require("Gurobi")
    found = solve(a_large_program(0, 60, 30), "Gurobi")

    assert found is not None
    if found.solver == "Exact":  # else a full licence
        assert "free licence allows 2000 columns and 2000 rows; this program has" in found.note


@pytest.mark.parametrize(("name", "package"), [("HiGHS", "highspy"), ("Gurobi", "gurobipy")])
def test_missing_solver_falls_back_to_exact_with_a_note(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    plan = plan_for(a_ladder(adaptation={"solver": name}), 20.0)
    asked_exact = plan_for(a_ladder(), 20.0)

    assert plan.spec.explanation.solver.startswith(f"Exact ({name} is not installed: pip install")
    assert plan.spec.stages == asked_exact.spec.stages


@pytest.mark.parametrize("name", ["Exact", "HiGHS", "Gurobi"])
def test_the_pipeline_chooses_its_solver(name):
    if name != "Exact":
        require(name)
    plan = plan_for(a_ladder(adaptation={"solver": name}), 20.0)

    assert plan.spec.explanation.solver == name
    assert plan.spec.explanation.gap <= 1e-6
    assert plan.spec.stages == plan_for(a_ladder(), 20.0).spec.stages


@pytest.mark.parametrize("name", ["HiGHS", "Gurobi"])
def test_overload_is_reported_by_each_solver(name):
    plan = plan_for(a_ladder(budget={"cores": "2"}, adaptation={"solver": name}), 5000.0)

    assert not plan.spec.feasible
    assert plan.spec.reason.startswith("overload: 2 cores carry")


def test_program_without_binaries_has_its_linear_optimum():
    require("HiGHS")
    built = MilpModel([], [], Rows(), ())
    one, other = built.column(3.0, 2.0), built.column(1.0, 5.0)
    built.rows.add({one: 1.0, other: 1.0}, upper=4.0)

    assert highs.maximize(built) == pytest.approx(3.0 * 2.0 + 1.0 * 2.0)

    built.rows.add({one: 1.0}, lower=3.0)
    with pytest.raises(SolverUnavailable, match="without an optimum"):
        highs.maximize(built)
