"""Other loads, promises and budgets tried on paper: `load=40/80,slo=200ms,budget=6`.

Several values of one thing, separated by `/`, are each tried with each of the others; `x1.5` multiplies what is now.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from trimtab_adapter.planning.planning_problem import PlanningError, PlanningProblem
from trimtab_adapter.planning.relaxation import PlanSolution, solve_or_relax
from trimtab_pipelines.errors import UserError
from trimtab_pipelines.quantity import parse_duration, parse_quantity

MAX_ALTERNATIVES = 64
FORM = "write for instance load=40/80,slo=200ms,budget=x1.5"


class WhatIfError(UserError, ValueError):
    """An alternative that cannot be read; the message shows the right form."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """One other question: what is different, and the best answer; without one, `reason` says why."""

    name: str
    problem: PlanningProblem
    solution: PlanSolution | None
    reason: str


def solve_alternatives(problem: PlanningProblem, asked: str) -> list[Alternative]:
    """Answer every combination of what is asked; raise WhatIfError where it cannot be read."""
    found = []
    for picked in itertools.islice(itertools.product(*parse_what_if(asked)), MAX_ALTERNATIVES):
        changed = problem
        for _, change in picked:
            changed = change(changed)
        found.append(_consider(" ".join(name for name, _ in picked), changed))
    return found


Change = Callable[[PlanningProblem], PlanningProblem]


def parse_what_if(asked: str) -> list[list[tuple[str, Change]]]:
    """Read what is asked: each thing that changes, with its values by name; raise WhatIfError where it cannot be."""
    parts = [_values(part.strip()) for part in asked.split(",")]
    names = [part[0][0].partition("=")[0] for part in parts]
    if len(set(names)) < len(names):
        raise WhatIfError(f"--what-if {asked}: give {max(names, key=names.count)} once; several values go with /")
    return parts


def _consider(name: str, problem: PlanningProblem) -> Alternative:
    try:
        found = solve_or_relax(problem)
    except PlanningError as error:
        return Alternative(name, problem, None, str(error))
    return Alternative(name, problem, found, found.reason)


def _values(part: str) -> list[tuple[str, Change]]:
    name, _, written = part.partition("=")
    if name not in _KINDS or not written:
        raise WhatIfError(f"--what-if {part!r}: {FORM}; what can change is {', '.join(_KINDS)}")
    try:
        return [(f"{name}={value}", _change(name, value)) for value in written.split("/")]
    except ValueError as error:
        raise WhatIfError(f"--what-if {part}: {error}") from None


def _change(name: str, written: str) -> Change:
    kind, multiplied = _KINDS[name], written.startswith("x")
    value = parse_quantity(written[1:]) if multiplied else kind.parse(written)
    if value <= 0 and name != "gpus":
        raise ValueError(f"{name} must be above 0")
    return lambda asked: kind.put(asked, value * kind.now(asked) if multiplied else value)


@dataclass(frozen=True, slots=True)
class _Kind:
    """One thing that can change: what it is now, how it is written, and where it goes."""

    now: Callable[[PlanningProblem], float]
    parse: Callable[[object], float]
    put: Callable[[PlanningProblem, float], PlanningProblem]


def _with(problem: PlanningProblem, section: str, field: str, value: float) -> PlanningProblem:
    part = getattr(problem.spec, section).model_copy(update={field: value})
    return replace(problem, spec=problem.spec.model_copy(update={section: part}))


_KINDS: Mapping[str, _Kind] = {
    "load": _Kind(lambda q: q.load_rps, parse_quantity, lambda q, value: replace(q, load_rps=value)),
    "slo": _Kind(
        lambda q: q.spec.slo.latency_seconds, parse_duration, lambda q, value: _with(q, "slo", "latency_seconds", value)
    ),
    "budget": _Kind(lambda q: q.spec.budget.cores, parse_quantity, lambda q, value: _with(q, "budget", "cores", value)),
    "gpus": _Kind(
        lambda q: float(q.spec.budget.gpus), parse_quantity, lambda q, value: _with(q, "budget", "gpus", int(value))
    ),
}
