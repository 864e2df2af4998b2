"""Two pipelines on one pool whose loads alternate: planned together at every step, against every fixed split."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.adapter.scenes import a_ladder, profiles_of
from trimtab_adapter.planning.planning_problem import PlanningProblem
from trimtab_adapter.planning.pool_allocation import PoolDemand, frontier, split_pool
from trimtab_adapter.planning.program_builder import build_program
from trimtab_adapter.solvers.program import TOLERANCE, Solution
from trimtab_pipelines.shared_capacity import Pool

CORES = 8.0
STEPS = 24
SPLITS = tuple(n / 4 for n in range(1, int(4 * CORES)))


@dataclass(frozen=True, slots=True)
class Sharing:
    """Mean objective and accuracy of both pipelines together, and the split that did best."""

    joint_objective: float
    joint_accuracy: float
    split_objective: float
    split_accuracy: float
    split_cores: float


def compare() -> Sharing:
    """The joint plans' mean, and that of the best split of the pool that holds at every step."""
    pipeline = a_ladder(budget={"cores": f"{CORES:g}"}, objective={"accuracyWeight": 40})
    profiles, pool = profiles_of(pipeline), Pool(cores=CORES)
    joint: list[list[Solution]] = []
    splits: dict[float, list[list[Solution]]] = {cores: [] for cores in SPLITS}
    for step in range(STEPS):
        swing = math.sin(2 * math.pi * step / STEPS)
        asked = {
            name: PlanningProblem(pipeline.spec, profiles, 160 + by * 140 * swing) for name, by in (("a", 1), ("b", -1))
        }
        answers = split_pool("shared", pool, {name: PoolDemand(problem) for name, problem in asked.items()})
        joint.append([answer.solution for answer in (answers or {}).values()])
        one, other = (frontier(replace(build_program(question), cores=CORES)) for question in asked.values())
        for cores, taken in splits.items():
            parts = (best_within(one, cores, 0), best_within(other, CORES - cores, 0))
            taken.append([part for part in parts if part is not None])
    holding = {cores: taken for cores, taken in splits.items() if all(len(parts) == 2 for parts in taken)}
    best = max(holding, key=lambda cores: _objective(holding[cores]))
    return Sharing(_objective(joint), _accuracy(joint), _objective(holding[best]), _accuracy(holding[best]), best)


def _objective(steps: list[list[Solution]]) -> float:
    return sum(level.objective for step in steps for level in step) / len(steps)


def _accuracy(steps: list[list[Solution]]) -> float:
    products = [math.prod(o.accuracy for o in level.choice) for step in steps for level in step]
    return sum(products) / len(products)


def best_within(points: Sequence[Solution], cores: float, gpus: int) -> Solution | None:
    """The best frontier point within a budget; None if none fits."""
    fitting = [point for point in points if point.cores <= cores + TOLERANCE and point.gpus <= gpus]
    return max(fitting, key=lambda point: point.objective, default=None)
