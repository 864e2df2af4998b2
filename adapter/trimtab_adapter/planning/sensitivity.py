"""What a little more or less would cost: plans next to the one chosen, each the best for a slightly other wish.

A price is a plan, not a derivative: options are few and far between, so the next millisecond may cost nothing at all,
or a whole replica.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trimtab_adapter.planning.pareto_frontier import STEP_CORES, frontier_steps
from trimtab_adapter.planning.relaxation import PlanSolution
from trimtab_adapter.solvers.exact import solve
from trimtab_adapter.solvers.program import TIE_BREAK, TOLERANCE, Option, Program, Weights

POINT = 0.01
MILLISECOND = 0.001
MAX_POINTS = 200
"""Of a curve."""
LATENCY_SAMPLES = 40
Planned = Callable[[Program, Sequence[Option]], Sequence[Option]]


@dataclass(frozen=True, slots=True)
class PlanEstimate:
    """A plan that could be, in figures. Accuracy is the product of the stages', whatever the objective's metric."""

    choice: tuple[Option, ...]
    accuracy: float
    cores: float
    gpus: int
    latency_seconds: float
    objective: float


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What is asked for, and the best plan that gives it; None where none does, and why."""

    change: str
    estimate: PlanEstimate | None
    reason: str = ""


def estimate(program: Program, choice: Sequence[Option]) -> PlanEstimate:
    """A choice in figures; the objective is without the price of changes."""
    return PlanEstimate(
        choice=tuple(choice),
        accuracy=math.prod(option.accuracy for option in choice),
        cores=sum(option.cores for option in choice),
        gpus=sum(option.gpus for option in choice),
        latency_seconds=program.latency_seconds(choice),
        objective=program.objective(choice) + sum(option.penalty for option in choice),
    )


def sensitivities(answer: PlanSolution, planned: Planned = lambda _, choice: choice) -> list[Sensitivity]:
    """What more accuracy, less latency, and fewer or more cores would take; `planned` makes plans of solutions."""
    program = answer.program
    now = estimate(program, planned(program, answer.solution.choice))
    asked = {
        "accuracy: the next better": _cheapest(program, now.accuracy + 10 * TOLERANCE),
        "accuracy +0.01": _cheapest(program, now.accuracy + POINT),
        "latency −1 ms": replace(program, slo_seconds=now.latency_seconds - MILLISECOND),
        "latency −10 %": replace(program, slo_seconds=0.9 * now.latency_seconds),
        "SLO +10 %": replace(program, slo_seconds=1.1 * program.slo_seconds),
        "fewer cores: the next less": replace(program, cores=now.cores - STEP_CORES),
        "1 core less": replace(program, cores=now.cores - 1.0),
        "budget +1 core": replace(program, cores=program.cores + 1.0),
    }
    if now.gpus:
        asked["1 GPU less"] = replace(program, gpus=now.gpus - 1)
    found = {what: solve(changed) for what, changed in asked.items()}
    return [
        Sensitivity(what, None, _why_not(program, asked[what]))
        if best is None
        else Sensitivity(what, estimate(program, planned(asked[what], best.choice)))
        for what, best in found.items()
    ]


def cores_curve(program: Program, most_cores: float) -> list[PlanEstimate]:
    """The most accurate plan of every amount of cores that makes a difference, least cores first."""
    accurate = replace(_by_accuracy(program), cores=most_cores)
    found = itertools.islice(frontier_steps(accurate), MAX_POINTS)
    return [estimate(program, level.solution.choice) for level in found][::-1]


def latency_curve(program: Program, most_seconds: float) -> list[PlanEstimate]:
    """The most accurate plan within the budget at latencies up to the most, fastest first."""
    accurate, found = _by_accuracy(program), []
    fastest = program.latency_seconds([min(s.options, key=lambda o: o.latency_seconds) for s in program.stages])
    ratio = max(most_seconds / max(fastest, TOLERANCE), 1.0)
    for n in range(LATENCY_SAMPLES):
        seconds = fastest * ratio ** (n / (LATENCY_SAMPLES - 1))
        solution = solve(replace(accurate, slo_seconds=seconds))
        if solution is not None:
            found.append(estimate(program, solution.choice))
    return found


def _why_not(program: Program, changed: Program) -> str:
    most = math.prod(max(option.accuracy for option in stage.options) for stage in program.stages)
    if changed.accuracy_floor > most:
        return f"the most accurate variants reach {most:.4f}"
    if changed.cores == math.inf:
        return "no plan within the SLO, whatever its cores"
    return "no plan carries the load within the other constraints"


def _by_accuracy(program: Program) -> Program:
    """Ask for the greatest product of accuracies, whatever the objective asks for."""
    stages = tuple(
        replace(stage, options=tuple(replace(option, value=option.accuracy, penalty=0.0) for option in stage.options))
        for stage in program.stages
    )
    weights = Weights(1.0, TIE_BREAK, TIE_BREAK * 1e-3)
    return replace(program, stages=stages, metric="Product", weights=weights, accuracy_floor=0.0)


def _cheapest(program: Program, accuracy: float) -> Program:
    """Ask for the fewest cores that reach an accuracy, whatever the budget has."""
    weights = Weights(TIE_BREAK, 1.0, TIE_BREAK * 1e-3)
    return replace(_by_accuracy(program), weights=weights, accuracy_floor=accuracy, cores=math.inf)
