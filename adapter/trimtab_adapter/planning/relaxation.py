"""Relaxation: the best plan if no plan satisfies every constraint.

Constraints are given up in a fixed order: the accuracy floor, part of the load, the SLO, pinned sizes, pins. The budget
is never exceeded. Only the first attempt uses the pipeline's chosen solver; the attempts that search for the smallest
violation use `exact`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from trimtab_adapter.planning.planning_problem import PlanningError, PlanningProblem
from trimtab_adapter.planning.program_builder import Relaxation, build_program
from trimtab_adapter.planning.slowdown_estimate import STEP
from trimtab_adapter.solvers.exact import solve
from trimtab_adapter.solvers.program import TIE_BREAK, Program, Solution, Weights
from trimtab_adapter.solvers.registry import get_solver
from trimtab_adapter.solvers.time_limit import once_per_decision

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
        """Whether every constraint is satisfied."""
        return self.reason == "Optimal"


def relax(problem: PlanningProblem) -> PlanningProblem:
    """Reduce the problem's slowdown until some plan satisfies every constraint.

    The slowdown reserves capacity for a machine that is slower than its profile. Giving up load for it is a certain
    loss: the plan would have less capacity, miss more SLOs and raise the slowdown further. If no plan satisfies every
    constraint even without it, the variant that keeps more of the load is used.
    """
    original = problem
    while problem.slowdown > 1.0 and _optimum(problem)[1] is None:
        problem = replace(problem, slowdown=max(problem.slowdown / STEP, 1.0))
    if problem is original or problem.slowdown > 1.0 or _optimum(problem)[1] is not None:
        return problem
    return max(original, problem, key=lambda candidate: solve_or_relax(candidate).fraction)


@once_per_decision
def _optimum(problem: PlanningProblem) -> tuple[Program, Solution | None]:
    """The program of a problem and its optimum; None if no choice satisfies every constraint."""
    program = build_program(problem)
    return program, get_solver(problem.spec.adaptation.solver)(program)


@once_per_decision
def solve_or_relax(problem: PlanningProblem) -> PlanSolution:
    """The optimal plan, or the best relaxed one.

    Raises PlanningError if the budget cannot hold any plan.
    """
    program, solution = _optimum(problem)
    latency_constraint, _ = problem.latency_target
    if solution is not None:
        return PlanSolution(
            program, solution, latency_constraint=latency_constraint, cores_constraint=problem.cores_constraint
        )
    for give_up in (_floor, _load, _slo, _sizes, _pins):
        found = give_up(problem)
        if found is not None:
            return replace(found, latency_constraint=latency_constraint, cores_constraint=problem.cores_constraint)
    raise PlanningError(
        f"no plan fits budget.cores {problem.spec.budget.cores:g} and budget.gpus {problem.spec.budget.gpus}: "
        "the smallest replica of each stage does not fit; raise the budget"
    )


def _floor(problem: PlanningProblem) -> PlanSolution | None:
    floor = problem.spec.objective.accuracy_floor
    if floor is None:
        return None
    program = build_program(problem, Relaxation(floor=True))
    program = replace(program, weights=Weights(1.0, TIE_BREAK, TIE_BREAK * 1e-3))
    solution = solve(program)
    if solution is None:
        return None
    reached = program.value(solution.choice)
    reason = (
        f"objective.accuracyFloor {floor:g} cannot be reached within the SLO and the budget; the best is {reached:.4g}"
    )
    return PlanSolution(program, solution, reason=reason)


def _load(problem: PlanningProblem) -> PlanSolution | None:
    return _largest_share(problem, Relaxation(floor=True), _overload)


def _slo(problem: PlanningProblem) -> PlanSolution | None:
    return _fastest(problem, Relaxation(floor=True, slo_seconds=math.inf), "")


def _sizes(problem: PlanningProblem) -> PlanSolution | None:
    pinned = [s.name for s in problem.spec.stages if s.pin.replicas is not None or s.pin.batch_size is not None]
    relaxed = Relaxation(floor=True, sizes=True)
    prefix = f"the pinned sizes of {', '.join(pinned)} do not fit; without them: "
    return _unpinned(problem, relaxed, prefix) if pinned else None


def _pins(problem: PlanningProblem) -> PlanSolution | None:
    pinned = [s.name for s in problem.spec.stages if s.pin.variant is not None or s.pin.operating_point is not None]
    relaxed = Relaxation(floor=True, pins=True)
    prefix = f"the pins of {', '.join(pinned)} do not fit; without them: "
    return _unpinned(problem, relaxed, prefix) if pinned else None


def _unpinned(problem: PlanningProblem, relaxed: Relaxation, prefix: str) -> PlanSolution | None:
    found = _largest_share(problem, relaxed, _overload)
    if found is not None:
        return replace(found, reason=prefix + found.reason)
    return _fastest(problem, replace(relaxed, slo_seconds=math.inf), prefix)


def _largest_share(
    problem: PlanningProblem, relaxed: Relaxation, describe: Callable[[PlanningProblem, float], str]
) -> PlanSolution | None:
    """Bisect for the largest share of the load that fits, and solve for slightly less."""

    def attempt(fraction: float) -> tuple[Program, Solution] | None:
        program = build_program(problem, replace(relaxed, fraction=fraction))
        solution = solve(program)
        return None if solution is None else (program, solution)

    full_load = attempt(1.0)
    if full_load is not None:
        return PlanSolution(*full_load, reason=describe(problem, 1.0))
    best, low, high = attempt(0.0), 0.0, 1.0
    if best is None:
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = attempt(middle)
        if found is None:
            high = middle
        else:
            best, low = found, middle
    slack = attempt(low * SLACK)
    share = low if slack is None else low * SLACK
    return PlanSolution(*(best if slack is None else slack), fraction=share, reason=describe(problem, share))


def _overload(problem: PlanningProblem, fraction: float) -> str:
    spec, (name, seconds) = problem.spec, problem.latency_target
    if fraction >= 1.0:
        return "the load fits"
    return (
        f"overload: {spec.budget.cores:g} cores carry {fraction:.0%} of {problem.load_rps:.3g} requests/s "
        f"within {name} {seconds * 1e3:.4g} ms"
    )


def _fastest(problem: PlanningProblem, relaxed: Relaxation, prefix: str) -> PlanSolution | None:
    """Drop the SLO, keep the largest share of the load, then bisect for the least latency at that share."""
    unbounded = _largest_share(problem, relaxed, _overload)
    if unbounded is None:
        return None
    best = unbounded
    low, high = 0.0, best.program.latency_seconds(best.solution.choice)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        program = replace(best.program, slo_seconds=middle)
        solution = solve(program)
        if solution is None:
            low = middle
        else:
            best = replace(best, program=program, solution=solution)
            high = program.latency_seconds(solution.choice)
    seconds = best.program.latency_seconds(best.solution.choice)
    name, target_seconds = problem.latency_target
    reason = (
        f"{prefix}{name} {target_seconds * 1e3:.4g} ms cannot be reached; the fastest plan needs {seconds * 1e3:.4g} ms"
    )
    if best.fraction < 1.0:
        reason += f" and carries {best.fraction:.0%} of {problem.load_rps:.3g} requests/s"
    # The latency reached becomes the constraint, so that enlarging batches does not make the plan slower.
    return replace(best, program=replace(best.program, slo_seconds=seconds), reason=reason)
