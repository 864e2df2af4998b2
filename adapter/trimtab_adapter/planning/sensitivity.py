"""Sensitivity analysis: the plans next to the chosen one and their discrete shadow prices.

Each sensitivity is a plan, not a derivative: options are few, so the next millisecond may cost nothing or a whole
replica.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trimtab_adapter.planning.pool_allocation import STEP_CORES
from trimtab_adapter.planning.relaxation import PlanSolution
from trimtab_adapter.solvers.exact import solve
from trimtab_adapter.solvers.program import TIE_BREAK, TOLERANCE, Option, Program, Weights

POINT = 0.01
MILLISECOND = 0.001
Planned = Callable[[Program, Sequence[Option]], Sequence[Option]]


@dataclass(frozen=True, slots=True)
class PlanEstimate:
    """Figures of a possible plan. Accuracy is the product over the stages, whatever the objective's metric."""

    choice: tuple[Option, ...]
    accuracy: float
    cores: float
    gpus: int
    cost_per_hour: float
    latency_seconds: float
    objective: float


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """A changed requirement and the best plan that meets it, or the reason why none does."""

    change: str
    estimate: PlanEstimate | None
    reason: str = ""


def estimate(program: Program, choice: Sequence[Option]) -> PlanEstimate:
    """Figures of a choice; the objective excludes switching costs."""
    return PlanEstimate(
        choice=tuple(choice),
        accuracy=math.prod(option.accuracy for option in choice),
        cores=sum(option.cores for option in choice),
        gpus=sum(option.gpus for option in choice),
        cost_per_hour=sum(option.cost for option in choice),
        latency_seconds=program.latency_seconds(choice),
        objective=program.objective(choice) + sum(option.penalty for option in choice),
    )


def sensitivities(solved: PlanSolution, planned: Planned = lambda _, choice: choice) -> list[Sensitivity]:
    """What more accuracy, less latency or cost, and fewer or more resources would require of solutions as `planned`."""
    program = solved.program
    now = estimate(program, planned(program, solved.solution.choice))
    changed_programs = {
        "accuracy: next better": _cheapest(program, now.accuracy + 10 * TOLERANCE),
        "accuracy +0.01": _cheapest(program, now.accuracy + POINT),
        "latency −1 ms": replace(program, slo_seconds=now.latency_seconds - MILLISECOND),
        "latency −10 %": replace(program, slo_seconds=0.9 * now.latency_seconds),
        "SLO +10 %": replace(program, slo_seconds=1.1 * program.slo_seconds),
        "cores: next fewer": replace(program, cores=now.cores - STEP_CORES),
        "1 core less": replace(program, cores=now.cores - 1.0),
        "budget +1 core": replace(program, cores=program.cores + 1.0),
        "cost −10 %": replace(program, cost=0.9 * now.cost_per_hour),
    }
    if now.gpus:
        changed_programs["1 GPU less"] = replace(program, gpus=now.gpus - 1)
    if any(option.gpus for stage in program.stages for option in stage.options):
        changed_programs["budget +1 GPU"] = replace(program, gpus=program.gpus + 1)
    for name, limit in program.flavors:
        more = tuple((each, limit + (each == name)) for each, limit in program.flavors)
        changed_programs[f"{name}: limit {limit + 1:g}"] = replace(program, flavors=more)
    found = {what: solve(changed) for what, changed in changed_programs.items()}
    return [
        Sensitivity(what, None, _infeasible_reason(program, changed_programs[what]))
        if best is None
        else Sensitivity(what, estimate(program, planned(changed_programs[what], best.choice)))
        for what, best in found.items()
    ]


def _infeasible_reason(program: Program, changed: Program) -> str:
    best_accuracy = math.prod(max(option.accuracy for option in stage.options) for stage in program.stages)
    if changed.accuracy_floor > best_accuracy:
        return f"the most accurate variants reach {best_accuracy:.4f}"
    if changed.cores == math.inf:
        return "no plan meets the SLO at any number of cores"
    return "no plan carries the load within the remaining constraints"


def _by_accuracy(program: Program) -> Program:
    """Maximise the product of accuracies, whatever the objective is."""
    stages = tuple(
        replace(stage, options=tuple(option._replace(value=option.accuracy, penalty=0.0) for option in stage.options))
        for stage in program.stages
    )
    weights = Weights(1.0, TIE_BREAK, TIE_BREAK * 1e-3)
    return replace(program, stages=stages, metric="Product", weights=weights, accuracy_floor=0.0)


def _cheapest(program: Program, accuracy: float) -> Program:
    """Minimise the cost at which an accuracy is reached, whatever the budgets of cores and cost are."""
    weights = Weights(TIE_BREAK, 1.0, TIE_BREAK * 1e-3)
    return replace(_by_accuracy(program), weights=weights, accuracy_floor=accuracy, cores=math.inf, cost=math.inf)
