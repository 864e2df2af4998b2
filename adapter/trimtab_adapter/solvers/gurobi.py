"""Gurobi solver, if it is installed and its licence allows the program's size.

The licence that comes with the package is free, not for production, and allows at most 2000 columns and 2000 rows. With
the linear form (`build_milp`) that is enough for some 20 stages of 20 variants.
"""

from functools import cache
from typing import Any

import numpy as np

from trimtab_adapter.solvers.milp import SOLVER_TOLERANCE, MilpModel, import_solver, solve_by
from trimtab_adapter.solvers.program import Program, Solution, SolverUnavailable
from trimtab_adapter.solvers.time_limit import SOLVE_SECONDS, seconds_left

_TOO_LARGE = 10010
"""Gurobi's number of the error."""


def solve(program: Program, time_limit_seconds: float = SOLVE_SECONDS) -> Solution | None:
    """As `exact.solve`; raises SolverUnavailable if Gurobi lacks a package or a licence for this program."""
    gurobi = import_solver("Gurobi", "gurobipy", extra="gurobi")

    def run(milp: MilpModel) -> tuple[list[float], float] | None:
        try:
            return _run(gurobi, milp, seconds_left(time_limit_seconds))
        except gurobi.GurobiError as error:
            if error.errno != _TOO_LARGE:
                raise SolverUnavailable(f"Gurobi: {error}") from error
            size = f"{len(milp.objective)} columns and {len(milp.rows.entries)} rows"
            limit = "Gurobi's free licence allows 2000 columns and 2000 rows"
            raise SolverUnavailable(f"{limit}; this program has {size}") from error

    return solve_by("Gurobi", run, program)


@cache
def _environment(gurobi: Any) -> Any:
    """Start Gurobi quietly, once; this checks the licence."""
    environment = gurobi.Env(empty=True)
    environment.setParam("OutputFlag", 0)
    environment.start()
    return environment


def _run(gurobi: Any, milp: MilpModel, time_limit_seconds: float) -> tuple[list[float], float] | None:
    with gurobi.Model(env=_environment(gurobi)) as model:
        settings = {"TimeLimit": time_limit_seconds, "Threads": 1, "MIPGap": 0.0, "MIPGapAbs": SOLVER_TOLERANCE}
        settings |= dict.fromkeys(("FeasibilityTol", "IntFeasTol", "OptimalityTol"), SOLVER_TOLERANCE)
        for name, value in settings.items():
            model.setParam(name, value)
        variables = _write(gurobi, model, milp)
        model.optimize()
        if model.Status in {gurobi.GRB.INFEASIBLE, gurobi.GRB.INF_OR_UNBD}:
            return None
        if model.SolCount == 0:
            raise SolverUnavailable(f"Gurobi ended without a plan, status {model.Status}")
        return variables.X.tolist(), float(model.ObjBound)


def _write(gurobi: Any, model: Any, milp: MilpModel) -> Any:
    kinds = ["B" if n < milp.binaries else "C" for n in range(len(milp.objective))]
    variables = model.addMVar(len(milp.objective), ub=np.array(milp.upper), obj=np.array(milp.objective), vtype=kinds)
    model.ModelSense = gurobi.GRB.MAXIMIZE
    columns = variables.tolist()
    for lower, upper, entries in zip(milp.rows.lower, milp.rows.upper, milp.rows.entries, strict=True):
        total = gurobi.LinExpr(list(entries.values()), [columns[column] for column in entries])
        if lower == upper:
            model.addLConstr(total, "=", lower)
            continue
        if upper < np.inf:
            model.addLConstr(total, "<", upper)
        if lower > -np.inf:
            model.addLConstr(total, ">", lower)
    return variables
