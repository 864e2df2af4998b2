"""Pareto frontier: a program's best choice at each amount of cores and GPUs where it changes.

The best objective is a step function of the budget. Its steps are found from the top: solve, then allow slightly less
than that choice uses, until nothing fits. Each step is an optimum, so a selection among steps is exact. When the time
limit is reached, steps become coarse: each has a tenth fewer cores, and the cheapest choice ends them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from trimtab_adapter.solvers.dominance import undominated
from trimtab_adapter.solvers.exact import solve
from trimtab_adapter.solvers.program import TIE_BREAK, Program, Solution, Weights
from trimtab_adapter.solvers.time_limit import out_of_time

COARSE = 0.9
"""Factor on the previous step's cores once the time limit is reached."""
STEP_CORES = 1e-6
"""Below any difference between two choices, above the rounding that constraints allow."""


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """The best choice of a program within these cores and GPUs."""

    cores: float
    gpus: int
    solution: Solution

    @property
    def objective(self) -> float:
        return self.solution.objective


def frontier(program: Program) -> tuple[FrontierPoint, ...]:
    """All choices that are best for some budget within the program's own, fewest cores first."""
    points = list(_steps(program))
    if not points:
        return ()
    respects = np.array([(-point.objective, point.cores, point.gpus) for point in points])
    return tuple(
        sorted((points[n] for n in undominated(list(respects.T))), key=lambda point: (point.cores, point.gpus))
    )


def frontier_steps(program: Program) -> Iterator[FrontierPoint]:
    """Yield the best choice of every amount of cores, from the whole budget down, with the program's GPUs."""
    cores = program.cores
    while (solution := solve(program)) is not None:
        cores = sum(option.cores for option in solution.choice)
        yield FrontierPoint(cores, sum(option.gpus for option in solution.choice), solution)
        program = replace(program, cores=COARSE * cores if out_of_time() else cores - STEP_CORES)
    if out_of_time():
        yield from _cheapest(program, cores)


def _cheapest(program: Program, above: float) -> Iterator[FrontierPoint]:
    """Yield the choice with the fewest cores, which coarse steps may skip."""
    cheapest = replace(program, cores=above - STEP_CORES, weights=Weights(TIE_BREAK, 1.0, 0.0))
    solution = solve(cheapest)
    if solution is not None:
        rescored = replace(solution, objective=program.objective(solution.choice))
        choice = rescored.choice
        yield FrontierPoint(sum(option.cores for option in choice), sum(option.gpus for option in choice), rescored)


def _steps(program: Program) -> Iterator[FrontierPoint]:
    gpus = program.gpus
    while gpus >= 0:
        used = -1
        for point in frontier_steps(replace(program, gpus=gpus)):
            used = max(used, point.gpus)
            yield point
        gpus = used - 1
