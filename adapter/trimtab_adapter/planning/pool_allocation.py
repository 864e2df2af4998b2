"""Several pipelines on one pool of cores and GPUs, planned together: the sum of their objectives is greatest. Pure.

Each pipeline's best plan at every amount of cores and GPUs (`frontier`) makes a column of choices; picking one of each
within the pool is a small knapsack, solved exactly. Weights are what makes pipelines comparable: one with twice the
accuracy weight gets the cores sooner, up to what the pool lets one pipeline gain (`Pool.max_gain`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.planning.decide import PlanningInputs
from trimtab_adapter.planning.pareto_frontier import FrontierPoint, frontier
from trimtab_adapter.planning.planning_problem import PlanningError, PlanningProblem
from trimtab_adapter.planning.relaxation import PlanSolution, solve_or_relax
from trimtab_adapter.solvers.dominance import undominated
from trimtab_adapter.solvers.program import TOLERANCE
from trimtab_adapter.solvers.time_limit import out_of_time
from trimtab_pipelines.pool import Pool
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline

_HALVINGS = 8


@dataclass(frozen=True, slots=True)
class Member:
    """One pipeline of a pool, and what is known when a decision is due."""

    pipeline: InferencePipeline
    profiles: Mapping[str, ModelProfile]
    situation: PlanningInputs


class PoolDemand:
    """What one pipeline asks of its pool. What it would do with so much of it is solved once, however often asked."""

    def __init__(self, question: PlanningProblem) -> None:
        self.question = question
        self._found: dict[tuple[Pool, float], tuple[PlanSolution, tuple[FrontierPoint, ...]]] = {}

    def answer(self, pool: Pool, part: float = 1.0) -> tuple[PlanSolution, tuple[FrontierPoint, ...]]:
        """Its answer for a part of its load with the whole pool, and its best plans within less of the pool.

        Raises PlanningError where its profiles do not fit it, or the pool cannot hold its smallest plan.
        """
        if (pool, part) not in self._found:
            eased = replace(self.question, load_rps=part * self.question.load_rps)
            found = solve_or_relax(_within(eased, pool))
            self._found[pool, part] = found, frontier(found.program)
        return self._found[pool, part]


def allocate(name: str, pool: Pool, questions: Mapping[str, PlanningProblem]) -> dict[str, PlanSolution]:
    """Divide a pool among pipelines so that the sum of their objectives is greatest, and answer each within its part.

    Where the pool cannot carry all, every pipeline carries the same share of its load, the greatest that finds room.
    Raises PlanningError where not even the smallest plans find room together.
    """
    answers = split_pool(name, pool, {key: PoolDemand(question) for key, question in questions.items()})
    if answers is None:
        least = f"pool {name}, {pool.cores:g} cores and {pool.gpus} GPUs, cannot hold the smallest plans of"
        raise PlanningError(f"{least} {', '.join(questions)}; raise it")
    return answers


def split_pool(name: str, pool: Pool, asked: Mapping[str, PoolDemand]) -> dict[str, PlanSolution] | None:
    """Do as `share` does, but return None where not even the smallest plans find room together."""
    whole = _jointly(name, pool, asked, 1.0)
    if whole is not None:
        return whole
    best, low, high = _eased(name, pool, asked, 0.0), 0.0, 1.0
    for _ in range(_HALVINGS if best is not None else 0):
        if out_of_time():
            break
        middle = (low + high) / 2
        found = _eased(name, pool, asked, middle)
        best, low, high = (best, low, middle) if found is None else (found, middle, high)
    return best


def _eased(name: str, pool: Pool, asked: Mapping[str, PoolDemand], part: float) -> dict[str, PlanSolution] | None:
    """Answer for a part of every pipeline's load."""
    found = _jointly(name, pool, asked, part)
    if found is None:
        return None
    reason = f"overload: pool {name}, {pool.cores:g} cores, carries {part:.0%} of the load of {', '.join(asked)}"
    return {key: replace(each, fraction=part * each.fraction, reason=reason) for key, each in found.items()}


def _jointly(name: str, pool: Pool, asked: Mapping[str, PoolDemand], part: float) -> dict[str, PlanSolution] | None:
    """Answer each alone with the whole pool, then fit these answers into it; None where they do not all fit."""
    alone = {key: each.answer(pool, part) for key, each in asked.items()}
    taken = _allocate(pool, [staircase for _, staircase in alone.values()])
    if taken is None:
        return None
    spare_cores = pool.cores - sum(level.cores for level in taken)
    spare_gpus = pool.gpus - sum(level.gpus for level in taken)
    return {
        key: _part(name, found, level, spare_cores, spare_gpus)
        for (key, (found, _)), level in zip(alone.items(), taken, strict=True)
    }


def _within(question: PlanningProblem, pool: Pool) -> PlanningProblem:
    budget = question.spec.budget
    least = {"cores": min(budget.cores, pool.cores), "gpus": min(budget.gpus, pool.gpus)}
    return replace(question, spec=question.spec.model_copy(update={"budget": budget.model_copy(update=least)}))


def _part(name: str, found: PlanSolution, level: FrontierPoint, spare_cores: float, spare_gpus: int) -> PlanSolution:
    """A pipeline's answer within what the others leave of the pool."""
    program = found.program
    cores, gpus = level.cores + spare_cores, level.gpus + spare_gpus
    return replace(
        found,
        program=replace(program, cores=min(program.cores, cores), gpus=min(program.gpus, gpus)),
        solution=level.solution,
        cores_are=f"cores of pool {name}" if cores < program.cores else found.cores_are,
        gpus_are=f"gpus of pool {name}" if gpus < program.gpus else found.gpus_are,
    )


def _allocate(pool: Pool, staircases: list[tuple[FrontierPoint, ...]]) -> list[FrontierPoint] | None:
    """Pick one level of each staircase so that all fit and their objectives add up to the most; None where none fit."""
    picked: list[tuple[FrontierPoint, ...]] = [()]
    figures = np.zeros((1, 3))  # −objective, cores, GPUs
    for staircase in staircases:
        own = np.array([(-level.objective, level.cores, level.gpus) for level in staircase]).reshape(-1, 3)
        own[:, 0] *= _scale(pool, own[:, 0])
        sums = (figures[:, None] + own).reshape(-1, 3)
        fits = np.nonzero((sums[:, 1] <= pool.cores + TOLERANCE) & (sums[:, 2] <= pool.gpus))[0]
        kept = fits[undominated(list(sums[fits].T))]
        picked = [(*picked[n // len(staircase)], staircase[n % len(staircase)]) for n in kept]
        figures = sums[kept]
    return list(picked[int(figures[:, 0].argmin())]) if picked else None


def _scale(pool: Pool, losses: NDArray[np.float64]) -> float:
    """What to multiply a pipeline's objectives by, so that it has no more at stake than the pool lets it."""
    gain = float(np.ptp(losses)) if losses.size else 0.0
    return min(1.0, pool.max_gain / gain) if gain > 0 else 1.0
