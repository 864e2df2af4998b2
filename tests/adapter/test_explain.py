"""Limits that a plan explains."""

from trimtab_adapter.planning.explain import binding_constraint
from trimtab_adapter.planning.relaxation import PlanSolution
from trimtab_adapter.solvers.exact import solve
from trimtab_adapter.solvers.program import Option, Program, StageOptions, Weights


def held_back(*slow: Option) -> str:
    """Explain a plan within 0.2 s, in which batches of eight are served, beside options that take half a second."""
    fast = Option("light", "default", 8, 1, 1.0, 0, 0.7, 0.7, 0.1, 100.0)
    stage = StageOptions("only", (), (fast, *slow))
    program = Program((stage,), 0.2, 8.0, 0, "Product", Weights(10.0, 0.5, 1e-6))
    solution = solve(program)
    assert solution is not None
    assert solution.choice == (fast,)
    return binding_constraint(PlanSolution(program, solution))


def test_a_better_model_that_the_slo_forbids_binds():
    better = Option("heavy", "default", 1, 1, 1.0, 0, 0.9, 0.9, 0.5, 100.0)

    assert held_back(better) == "slo.latency: without it the objective would gain 2"


def test_a_smaller_batch_alone_is_nothing_to_be_held_back_from():
    smaller = Option("light", "default", 1, 1, 1.0, 0, 0.7, 0.7, 0.5, 100.0)

    assert held_back(smaller).startswith("none")
