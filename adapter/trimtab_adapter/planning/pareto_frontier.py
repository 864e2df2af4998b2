"""What every budget would buy: a program's best choice at each amount of cores and GPUs where it changes.

The best objective is a staircase over the budget. Its steps are found from the top: solve, then allow a little less
than that choice uses, and so on until nothing fits. Each step is an optimum, so what is picked from the steps is exact.
Where the time is up steps become coarse: each leaves a tenth of the cores, and the cheapest choice of all ends them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from trimtab_adapter.solvers.dominance import undominated
from trimtab_adapter.solvers.exact import solve
from trimtab_adapter.solvers.program import TIE_BREAK, Program, Solution, Weights
from trimtab_adapter.solvers.time_limit import out_of_time

COARSE = 0.9
"""Of the cores of the step before, where the time is up."""
STEP_CORES = 1e-6
"""Below any difference of two choices, above the rounding that constraints allow."""


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """The best choice of a program that uses so much, and what it is worth."""

    cores: float
    gpus: int
    solution: Solution

    @property
    def objective(self) -> float:
        """The objective it reaches."""
        return self.solution.objective


def frontier(program: Program) -> tuple[FrontierPoint, ...]:
    """All choices that are best for some budget within the program's own, least cores first."""
    found = list(_steps(program))
    if not found:
        return ()
    respects = np.array([(-level.objective, level.cores, level.gpus) for level in found])
    return tuple(sorted((found[n] for n in undominated(list(respects.T))), key=lambda level: (level.cores, level.gpus)))


def frontier_steps(program: Program) -> Iterator[FrontierPoint]:
    """Yield the best choice of every amount of cores, from the whole budget down; GPUs as the program allows."""
    cores = program.cores
    while (solution := solve(program)) is not None:
        cores = sum(option.cores for option in solution.choice)
        yield FrontierPoint(cores, sum(option.gpus for option in solution.choice), solution)
        program = replace(program, cores=COARSE * cores if out_of_time() else cores - STEP_CORES)
    if out_of_time():
        yield from _cheapest(program, cores)


def _cheapest(program: Program, above: float) -> Iterator[FrontierPoint]:
    """Yield the choice of the fewest cores, where coarse steps went past it."""
    thrifty = replace(program, cores=above - STEP_CORES, weights=Weights(TIE_BREAK, 1.0, 0.0))
    solution = solve(thrifty)
    if solution is not None:
        worth = replace(solution, objective=program.objective(solution.choice))
        choice = worth.choice
        yield FrontierPoint(sum(option.cores for option in choice), sum(option.gpus for option in choice), worth)


def _steps(program: Program) -> Iterator[FrontierPoint]:
    gpus = program.gpus
    while gpus >= 0:
        used = -1
        for level in frontier_steps(replace(program, gpus=gpus)):
            used = max(used, level.gpus)
            yield level
        gpus = used - 1
