"""Alternatives to a planning problem: other loads, SLOs and budgets, `load=40/80,slo=200ms,budget=6` (what-if).

Several values of one parameter, separated by `/`, are each combined with each value of the others; `x1.5` multiplies
the current value.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from trimtab_adapter.planning.planning_problem import PlanningError, PlanningProblem
from trimtab_adapter.planning.relaxation import PlanSolution, solve_or_relax
from trimtab_pipelines.errors import UserError
from trimtab_pipelines.quantity import parse_duration, parse_quantity

MAX_ALTERNATIVES = 64
EXAMPLE = "for example load=40/80,slo=200ms,budget=x1.5"


class WhatIfError(UserError, ValueError):
    """An alternative that cannot be parsed; the message shows the right form."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A changed problem and its best solution; without one, `reason` says why."""

    name: str
    problem: PlanningProblem
    solution: PlanSolution | None
    reason: str


def solve_alternatives(problem: PlanningProblem, text: str) -> list[Alternative]:
    """Solve every requested combination; raise WhatIfError if the text cannot be parsed."""
    found = []
    for combination in itertools.islice(itertools.product(*parse_what_if(text)), MAX_ALTERNATIVES):
        changed = problem
        for _, change in combination:
            changed = change(changed)
        found.append(_solve_alternative(" ".join(name for name, _ in combination), changed))
    return found


Change = Callable[[PlanningProblem], PlanningProblem]


def parse_what_if(text: str) -> list[list[tuple[str, Change]]]:
    """Parse the text into the values of each parameter; raise WhatIfError if it is invalid."""
    parts = [_values(part.strip()) for part in text.split(",")]
    names = [part[0][0].partition("=")[0] for part in parts]
    if len(set(names)) < len(names):
        raise WhatIfError(f"--what-if {text}: give {max(names, key=names.count)} once; separate several values with /")
    return parts


def _solve_alternative(name: str, problem: PlanningProblem) -> Alternative:
    try:
        found = solve_or_relax(problem)
    except PlanningError as error:
        return Alternative(name, problem, None, str(error))
    return Alternative(name, problem, found, found.reason)


def _values(part: str) -> list[tuple[str, Change]]:
    name, _, written = part.partition("=")
    if name not in _PARAMETERS or not written:
        raise WhatIfError(f"--what-if {part!r}: {EXAMPLE}; parameters: {', '.join(_PARAMETERS)}")
    try:
        return [(f"{name}={value}", _change(name, value)) for value in written.split("/")]
    except ValueError as error:
        raise WhatIfError(f"--what-if {part}: {error}") from None


def _change(name: str, written: str) -> Change:
    kind, multiplied = _PARAMETERS[name], written.startswith("x")
    value = parse_quantity(written[1:]) if multiplied else kind.parse(written)
    if value <= 0 and name != "gpus":
        raise ValueError(f"{name} must be above 0")
    return lambda problem: kind.put(problem, value * kind.now(problem) if multiplied else value)


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter that can change: its current value, its parser and its setter."""

    now: Callable[[PlanningProblem], float]
    parse: Callable[[object], float]
    put: Callable[[PlanningProblem, float], PlanningProblem]


def _with(problem: PlanningProblem, section: str, field: str, value: float) -> PlanningProblem:
    part = getattr(problem.spec, section).model_copy(update={field: value})
    return replace(problem, spec=problem.spec.model_copy(update={section: part}))


_PARAMETERS: Mapping[str, _Parameter] = {
    "load": _Parameter(lambda q: q.load_rps, parse_quantity, lambda q, value: replace(q, load_rps=value)),
    "slo": _Parameter(
        lambda q: q.spec.slo.latency_seconds, parse_duration, lambda q, value: _with(q, "slo", "latency_seconds", value)
    ),
    "budget": _Parameter(
        lambda q: q.spec.budget.cores, parse_quantity, lambda q, value: _with(q, "budget", "cores", value)
    ),
    "gpus": _Parameter(
        lambda q: float(q.spec.budget.gpus), parse_quantity, lambda q, value: _with(q, "budget", "gpus", int(value))
    ),
}
