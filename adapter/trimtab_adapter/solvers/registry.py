"""Solver registry: the solver of a pipeline, with `exact` as the fallback, which needs only numpy."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from trimtab_adapter.solvers import exact, gurobi, highs
from trimtab_adapter.solvers.interface import Solver, SolverUnavailable
from trimtab_adapter.solvers.program import Program, Solution

SOLVERS: Mapping[str, Solver] = {"Exact": exact.solve, "HiGHS": highs.solve, "Gurobi": gurobi.solve}


def get_solver(name: Literal["Exact", "HiGHS", "Gurobi"]) -> Solver:
    """The solver of that name; if it is unavailable, `exact` solves and the solution notes the reason."""
    return exact.solve if name == "Exact" else _or_exact(SOLVERS[name])


def _or_exact(preferred: Solver) -> Solver:
    def solve(program: Program) -> Solution | None:
        try:
            return preferred(program)
        except SolverUnavailable as reason:
            found = exact.solve(program)
            return None if found is None else replace(found, note="; ".join(filter(None, (str(reason), found.note))))

    return solve
