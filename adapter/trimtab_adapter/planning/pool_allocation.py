"""Pool allocation: plans several pipelines of one pool jointly, so that the sum of their objectives is greatest.

Each pipeline's Pareto frontier has its best choice at each amount of cores and GPUs where it changes. Picking one of
each within the pool is a small knapsack, solved exactly. Objective weights make pipelines comparable: one with twice
the accuracy weight gets cores sooner, up to the gain the pool allows one pipeline (`Pool.max_gain`).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.planning.decide import PlanningInputs
from trimtab_adapter.planning.planning_problem import PlanningProblem
from trimtab_adapter.planning.relaxation import PlanSolution, solve_or_relax
from trimtab_adapter.solvers.dominance import undominated
from trimtab_adapter.solvers.exact import solve
from trimtab_adapter.solvers.program import TIE_BREAK, TOLERANCE, Program, Solution, StageOptions, Weights
from trimtab_adapter.solvers.time_limit import out_of_time
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline, InferencePipelineSpec, Pool

COARSE = 0.9
"""Factor on the previous step's cores once the time limit is reached."""
STEP_CORES = 1e-6
"""Below any difference between two choices, above the rounding that constraints allow."""
_HALVINGS = 8


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """One pipeline of a pool, and its planning inputs."""

    pipeline: InferencePipeline
    profiles: Mapping[str, ModelProfile]
    planning_inputs: PlanningInputs


def frontier(program: Program) -> tuple[Solution, ...]:
    """All solutions that are best for some budget within the program's own, fewest cores first."""
    solutions = list(_solutions_by_gpus(program))
    if not solutions:
        return ()
    criteria = np.array([(-solution.objective, solution.cores, solution.gpus) for solution in solutions])
    kept = (solutions[n] for n in undominated(list(criteria.T)))
    return tuple(sorted(kept, key=lambda solution: (solution.cores, solution.gpus)))


def frontier_steps(program: Program) -> Iterator[Solution]:
    """Yield the best solution of every amount of cores, from the whole budget down, with the program's GPUs."""
    cores = program.cores
    while (solution := solve(program)) is not None:
        cores = solution.cores
        yield solution
        program = replace(program, cores=COARSE * cores if out_of_time() else cores - STEP_CORES)
    if out_of_time():  # coarse steps may skip the solution with the fewest cores
        by_cores = tuple(_priced_by_cores(stage) for stage in program.stages)
        weights = Weights(TIE_BREAK, 1.0, 0.0)
        fewest = solve(replace(program, stages=by_cores, cores=cores - STEP_CORES, weights=weights, cost=math.inf))
        if fewest is not None:
            picks = zip(program.stages, by_cores, fewest.choice, strict=True)
            choice = tuple(stage.options[priced.options.index(option)] for stage, priced, option in picks)
            if sum(option.cost for option in choice) <= program.cost + TOLERANCE:
                yield replace(fewest, choice=choice, objective=program.objective(choice))


def _priced_by_cores(stage: StageOptions) -> StageOptions:
    return replace(stage, options=tuple(option._replace(cost=option.cores) for option in stage.options))


def _solutions_by_gpus(program: Program) -> Iterator[Solution]:
    gpus = program.gpus
    while gpus >= 0:
        used = -1
        for solution in frontier_steps(replace(program, gpus=gpus)):
            used = max(used, solution.gpus)
            yield solution
        gpus = used - 1


class PoolDemand:
    """The problem of one pipeline in a pool, with its solutions for parts of the load, each solved once."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self._found: dict[tuple[Pool, float], tuple[PlanSolution, tuple[Solution, ...]]] = {}

    def solve(self, pool: Pool, part: float = 1.0) -> tuple[PlanSolution, tuple[Solution, ...]]:
        """Its solution for a part of its load with the whole pool, and its frontier; raises PlanningError."""
        if (pool, part) not in self._found:
            spec = limit_budget(self.problem.spec, pool.cores, pool.gpus)
            found = solve_or_relax(replace(self.problem, spec=spec, load_rps=part * self.problem.load_rps))
            self._found[pool, part] = found, frontier(found.program)
        return self._found[pool, part]


def split_pool(name: str, pool: Pool, demands: Mapping[str, PoolDemand]) -> dict[str, PlanSolution] | None:
    """Divide a pool among pipelines so that the sum of their objectives is greatest, and solve each within its part.

    If the pool cannot carry all, every pipeline carries the same share of its load, the greatest that fits. None if the
    smallest plans do not fit together.
    """
    full_load = _solve_jointly(name, pool, demands, 1.0)
    if full_load is not None:
        return full_load
    best, low, high = _solve_jointly(name, pool, demands, 0.0), 0.0, 1.0
    for _ in range(_HALVINGS if best is not None else 0):
        if out_of_time():
            break
        middle = (low + high) / 2
        found = _solve_jointly(name, pool, demands, middle)
        best, low, high = (best, low, middle) if found is None else (found, middle, high)
    return best


def _solve_jointly(
    name: str, pool: Pool, demands: Mapping[str, PoolDemand], part: float
) -> dict[str, PlanSolution] | None:
    """Solve each pipeline alone with the whole pool, then fit the solutions into it; None if they do not all fit."""
    separate = {key: each.solve(pool, part) for key, each in demands.items()}
    chosen = _pick_points(pool, [points for _, points in separate.values()])
    if chosen is None:
        return None
    spare_cores = pool.cores - sum(point.cores for point in chosen)
    spare_gpus = pool.gpus - sum(point.gpus for point in chosen)
    joint = {
        key: _pool_share(name, found, point, spare_cores, spare_gpus)
        for (key, (found, _)), point in zip(separate.items(), chosen, strict=True)
    }
    if part == 1.0:
        return joint
    reason = f"overload: pool {name}, {pool.cores:g} cores, carries {part:.0%} of the load of {', '.join(demands)}"
    return {key: replace(solved, fraction=part * solved.fraction, reason=reason) for key, solved in joint.items()}


def limit_budget(spec: InferencePipelineSpec, cores: float, gpus: int) -> InferencePipelineSpec:
    least = {"cores": min(spec.budget.cores, cores), "gpus": min(spec.budget.gpus, gpus)}
    return spec.replace(budget=spec.budget.replace(**least))


def _pool_share(name: str, found: PlanSolution, point: Solution, spare_cores: float, spare_gpus: int) -> PlanSolution:
    """A pipeline's solution within what the others leave of the pool."""
    program = found.program
    cores, gpus = point.cores + spare_cores, point.gpus + spare_gpus
    return replace(
        found,
        program=replace(program, cores=min(program.cores, cores), gpus=min(program.gpus, gpus)),
        solution=point,
        cores_constraint=f"cores of pool {name}" if cores < program.cores else found.cores_constraint,
        gpus_constraint=f"gpus of pool {name}" if gpus < program.gpus else found.gpus_constraint,
    )


def _pick_points(pool: Pool, frontiers: list[tuple[Solution, ...]]) -> list[Solution] | None:
    """Pick one point of each frontier so that all fit and their objectives add up to the most; None if none fit."""
    picked: list[tuple[Solution, ...]] = [()]
    figures = np.zeros((1, 3))  # −objective, cores, GPUs
    for points in frontiers:
        own = np.array([(-point.objective, point.cores, point.gpus) for point in points]).reshape(-1, 3)
        own[:, 0] *= _objective_scale(pool, own[:, 0])
        sums = (figures[:, None] + own).reshape(-1, 3)
        fits = np.nonzero((sums[:, 1] <= pool.cores + TOLERANCE) & (sums[:, 2] <= pool.gpus))[0]
        kept = fits[undominated(list(sums[fits].T))]
        picked = [(*picked[n // len(points)], points[n % len(points)]) for n in kept]
        figures = sums[kept]
    return list(picked[int(figures[:, 0].argmin())]) if picked else None


def _objective_scale(pool: Pool, losses: NDArray[np.float64]) -> float:
    """Factor on a pipeline's objectives, so that it can gain no more than the pool allows."""
    gain = float(np.ptp(losses)) if losses.size else 0.0
    return min(1.0, pool.max_gain / gain) if gain > 0 else 1.0
