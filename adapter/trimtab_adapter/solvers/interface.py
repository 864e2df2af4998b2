"""What every solver is: a function from a program to its solution, None where no choice keeps every constraint."""

from collections.abc import Callable

from trimtab_adapter.solvers.program import Program, Solution

Solver = Callable[[Program], Solution | None]


class SolverUnavailable(Exception):
    """This solver cannot answer this program here; the message says why and what would help."""
