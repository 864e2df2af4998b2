"""HiGHS solver, an open mixed-integer solver: slower than `exact`, and independent of it."""

from typing import Any

import numpy as np

from trimtab_adapter.solvers.milp import SOLVER_TOLERANCE, MilpModel, import_solver, solve_by
from trimtab_adapter.solvers.program import Program, Solution, SolverUnavailable
from trimtab_adapter.solvers.time_limit import SOLVE_SECONDS, seconds_left


def solve(program: Program, time_limit_seconds: float = SOLVE_SECONDS) -> Solution | None:
    """As `exact.solve`; raises SolverUnavailable without HiGHS."""
    highspy = import_solver("HiGHS", "highspy", extra="solvers")
    return solve_by("HiGHS", lambda milp: _run(highspy, milp, seconds_left(time_limit_seconds)), program)


def _run(highspy: Any, milp: MilpModel, time_limit_seconds: float) -> tuple[list[float], float] | None:
    solver = highspy.Highs()
    options = {"output_flag": False, "threads": 1, "time_limit": time_limit_seconds}
    options |= {"mip_rel_gap": 0.0, "mip_abs_gap": SOLVER_TOLERANCE, "mip_feasibility_tolerance": SOLVER_TOLERANCE}
    options |= dict.fromkeys(("primal_feasibility_tolerance", "dual_feasibility_tolerance"), SOLVER_TOLERANCE)
    for name, value in options.items():
        solver.setOptionValue(name, value)
    solver.passModel(_model(highspy, milp))
    solver.run()
    status = solver.getModelStatus()
    if status in {highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible}:
        return None
    info = solver.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        raise SolverUnavailable(f"HiGHS ended without a plan: {solver.modelStatusToString(status)}")
    return list(solver.getSolution().col_value), float(info.mip_dual_bound)


def _model(highspy: Any, milp: MilpModel) -> Any:
    model, count = highspy.HighsLp(), len(milp.objective)
    model.num_col_, model.num_row_ = count, len(milp.rows.entries)
    model.sense_ = highspy.ObjSense.kMaximize
    model.col_cost_ = np.array(milp.objective)
    model.col_lower_, model.col_upper_ = np.zeros(count), np.array(milp.upper)
    model.row_lower_, model.row_upper_ = np.array(milp.rows.lower), np.array(milp.rows.upper)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = milp.rows.compressed()
    kinds = highspy.HighsVarType
    model.integrality_ = [kinds.kInteger if n < milp.binaries else kinds.kContinuous for n in range(count)]
    return model
