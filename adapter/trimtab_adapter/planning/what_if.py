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
    alternatives = []
    for combination in itertools.islice(itertools.product(*parse_what_if(text)), MAX_ALTERNATIVES):
        name, changed = " ".join(name for name, _ in combination), problem
        for _, change in combination:
            changed = change(changed)
        try:
            solution = solve_or_relax(changed)
            alternatives.append(Alternative(name, changed, solution, solution.reason))
        except PlanningError as error:
            alternatives.append(Alternative(name, changed, None, str(error)))
    return alternatives


Change = Callable[[PlanningProblem], PlanningProblem]


def parse_what_if(text: str) -> list[list[tuple[str, Change]]]:
    """Parse the text into the values of each parameter; raise WhatIfError if it is invalid."""
    parts = [_values(part.strip()) for part in text.split(",")]
    names = [part[0][0].partition("=")[0] for part in parts]
    if len(set(names)) < len(names):
        raise WhatIfError(f"--what-if {text}: give {max(names, key=names.count)} once; separate several values with /")
    return parts


def _values(part: str) -> list[tuple[str, Change]]:
    name, _, written = part.partition("=")
    if name not in _PARAMETERS or not written:
        raise WhatIfError(f"--what-if {part!r}: {EXAMPLE}; parameters: {', '.join(_PARAMETERS)}")
    try:
        return [(f"{name}={value}", _change(name, value)) for value in written.split("/")]
    except ValueError as error:
        raise WhatIfError(f"--what-if {part}: {error}") from None


def _change(name: str, written: str) -> Change:
    multiplied, place = written.startswith("x"), _PARAMETERS[name]
    parse = parse_duration if name == "slo" and not multiplied else parse_quantity
    value = parse(written.removeprefix("x"))
    if value <= 0 and name != "gpus":
        raise ValueError(f"{name} must be above 0")

    def change(problem: PlanningProblem) -> PlanningProblem:
        if place is None:
            return replace(problem, load_rps=value * problem.load_rps if multiplied else value)
        section, field = place
        part = getattr(problem.spec, section)
        if multiplied and getattr(part, field) is None:
            raise WhatIfError(f"--what-if {name}={written}: spec.budget has no costPerHour; write {name}=NUMBER")
        changed = value * getattr(part, field) if multiplied else value
        part = part.replace(**{field: int(changed) if name == "gpus" else changed})
        return replace(problem, spec=problem.spec.replace(**{section: part}))

    return change


_PARAMETERS: Mapping[str, tuple[str, str] | None] = {
    "load": None,
    "slo": ("slo", "latency_seconds"),
    "budget": ("budget", "cores"),
    "gpus": ("budget", "gpus"),
    "cost": ("budget", "cost_per_hour"),
}
"""Section and field of the spec, by name; the load is not part of the spec."""
