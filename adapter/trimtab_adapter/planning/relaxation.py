"""Relaxation: the best plan if no plan satisfies every constraint.

Constraints are given up in a fixed order: the accuracy floor, part of the load, the SLO, pinned sizes, pins. The budget
is never exceeded. Only the first attempt uses the pipeline's chosen solver; the attempts that search for the smallest
violation use `exact`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from trimtab_adapter.planning.planning_problem import PlanningError, PlanningProblem
from trimtab_adapter.planning.program_builder import NO_RELAXATION, Relaxation, build_program
from trimtab_adapter.planning.slowdown_estimate import STEP
from trimtab_adapter.solvers import exact, gurobi, highs
from trimtab_adapter.solvers.program import TIE_BREAK, Program, Solution, Solver, SolverUnavailable, Weights

SOLVERS: Mapping[str, Solver] = {"Exact": exact.solve, "HiGHS": highs.solve, "Gurobi": gurobi.solve}
_HALVINGS = 12
SLACK = 0.97
"""Share of the largest load that is planned for, so that plans of equal value do not alternate under equal overload."""


@dataclass(frozen=True, slots=True)
class PlanSolution:
    """A solution, the program it solves, and which constraint was relaxed for it."""

    program: Program
    solution: Solution
    fraction: float = 1.0
    reason: str = "Optimal"
    cores_constraint: str = "budget.cores"
    """Name of the limit on the program's cores."""
    gpus_constraint: str = "budget.gpus"
    latency_constraint: str = "slo.latency"

    @property
    def feasible(self) -> bool:
        return self.reason == "Optimal"


def relax(problem: PlanningProblem) -> PlanningProblem:
    """Reduce the problem's slowdown until some plan satisfies every constraint.

    The slowdown reserves capacity for a machine that is slower than its profile. Giving up load for it is a certain
    loss: the plan would have less capacity, miss more SLOs and raise the slowdown further. If no plan satisfies every
    constraint even without it, the variant that keeps more of the load is used.
    """
    original = problem
    while _solve(problem, NO_RELAXATION)[1] is None:
        if problem.slowdown <= 1.0:
            variants = dict.fromkeys((original, problem))
            return max(variants, key=lambda variant: solve_or_relax(variant).fraction) if len(variants) > 1 else problem
        problem = replace(problem, slowdown=max(problem.slowdown / STEP, 1.0))
    return problem


def _solve(problem: PlanningProblem, relaxed: Relaxation) -> tuple[Program, Solution | None]:
    """The program of a problem and its optimum; None if no choice satisfies every constraint."""
    if relaxed not in problem.solved:
        program, solver = build_program(problem, relaxed), problem.spec.adaptation.solver
        optimum = solve(program, solver) if relaxed == NO_RELAXATION else exact.solve(program)
        problem.solved[relaxed] = program, optimum
    program_and_optimum: tuple[Program, Solution | None] = problem.solved[relaxed]
    return program_and_optimum


def solve(program: Program, solver: Literal["Exact", "HiGHS", "Gurobi"]) -> Solution | None:
    """Solve by the given solver; if it is unavailable, `exact` solves and the solution notes the reason."""
    try:
        return SOLVERS[solver](program)
    except SolverUnavailable as reason:
        solution = exact.solve(program)
        return solution and replace(solution, note="; ".join(filter(None, (str(reason), solution.note))))


def solve_or_relax(problem: PlanningProblem) -> PlanSolution:
    """The optimal plan, or the best relaxed one. Raises PlanningError if the budget cannot hold any plan."""
    latency_constraint, _ = problem.latency_target
    program, solution = _solve(problem, NO_RELAXATION)
    if solution is not None:
        return PlanSolution(program, solution, latency_constraint=latency_constraint)
    if "relaxed plan" not in problem.solved:
        problem.solved["relaxed plan"] = next(filter(None, _relaxations(problem)), None)
    relaxed: PlanSolution | None = problem.solved["relaxed plan"]
    if relaxed is None:
        budget = f"budget.cores {problem.spec.budget.cores:g} and budget.gpus {problem.spec.budget.gpus}"
        remedy = "the smallest replica of each stage does not fit; raise the budget"
        raise PlanningError(f"no plan fits {budget}: {remedy}")
    return replace(relaxed, latency_constraint=latency_constraint)


def _relaxations(problem: PlanningProblem) -> Iterator[PlanSolution | None]:
    """Yield the best plan without each constraint, in the order in which they are given up."""
    floor, stages = problem.spec.objective.accuracy_floor, problem.spec.stages
    without_floor = Relaxation(floor=floor is not None)
    if floor is not None:
        yield _most_accurate(problem, floor)
    yield _largest_share(problem, without_floor)
    yield _fastest(problem, without_floor)
    if sized := [s.name for s in stages if s.pin.replicas is not None or s.pin.batch_size is not None]:
        prefix = f"the pinned sizes of {', '.join(sized)} do not fit; without them: "
        yield _unpinned(problem, replace(without_floor, sizes=True), prefix)
    if pinned := [s.name for s in stages if s.pin.variant is not None or s.pin.operating_point is not None]:
        prefix = f"the pins of {', '.join(pinned)} do not fit; without them: "
        yield _unpinned(problem, replace(without_floor, pins=True), prefix)


def _most_accurate(problem: PlanningProblem, floor: float) -> PlanSolution | None:
    program = build_program(problem, Relaxation(floor=True))
    program = replace(program, weights=Weights(1.0, TIE_BREAK, TIE_BREAK * 1e-3))
    solution = exact.solve(program)
    if solution is None:
        return None
    best = program.value(solution.choice)
    reason = f"objective.accuracyFloor {floor:g} cannot be reached within the SLO and the budget"
    return PlanSolution(program, solution, reason=f"{reason}; the best is {best:.4g}")


def _unpinned(problem: PlanningProblem, relaxed: Relaxation, prefix: str) -> PlanSolution | None:
    solved = _largest_share(problem, relaxed) or _fastest(problem, relaxed)
    return None if solved is None else replace(solved, reason=prefix + solved.reason)


def _largest_share(problem: PlanningProblem, relaxed: Relaxation) -> PlanSolution | None:
    """Bisect for the largest share of the load that fits, and solve for slightly less."""

    def attempt(fraction: float) -> tuple[Program, Solution] | None:
        program, solution = _solve(problem, replace(relaxed, fraction=fraction))
        return None if solution is None else (program, solution)

    full_load = attempt(1.0)
    if full_load is not None:
        return PlanSolution(*full_load, reason="the load fits")
    best, low, high = attempt(0.0), 0.0, 1.0
    if best is None:
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fitting = attempt(middle)
        if fitting is None:
            high = middle
        else:
            best, low = fitting, middle
    slack = attempt(low * SLACK)
    share = low if slack is None else low * SLACK
    name, seconds = problem.latency_target
    reason = (
        f"overload: {problem.spec.budget.cores:g} cores carry {share:.0%} of {problem.load_rps:.3g} requests/s "
        f"within {name} {seconds * 1e3:.4g} ms"
    )
    return PlanSolution(*(slack or best), fraction=share, reason=reason)


def _fastest(problem: PlanningProblem, relaxed: Relaxation) -> PlanSolution | None:
    """Drop the SLO, keep the largest share of the load, then bisect for the least latency at that share."""
    best = _largest_share(problem, replace(relaxed, slo_seconds=math.inf))
    if best is None:
        return None
    low, high = 0.0, best.program.latency_seconds(best.solution.choice)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        program = replace(best.program, slo_seconds=middle)
        solution = exact.solve(program)
        if solution is None:
            low = middle
        else:
            best = replace(best, program=program, solution=solution)
            high = program.latency_seconds(solution.choice)
    seconds = best.program.latency_seconds(best.solution.choice)
    name, target_seconds = problem.latency_target
    reason = f"{name} {target_seconds * 1e3:.4g} ms cannot be reached; the fastest plan needs {seconds * 1e3:.4g} ms"
    if best.fraction < 1.0:
        reason += f" and carries {best.fraction:.0%} of {problem.load_rps:.3g} requests/s"
    # The latency reached becomes the constraint, so that enlarging batches does not make the plan slower.
    return replace(best, program=replace(best.program, slo_seconds=seconds), reason=reason)
