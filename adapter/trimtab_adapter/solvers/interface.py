"""Solver interface: a function from a program to its solution, None if no choice satisfies every constraint."""

from collections.abc import Callable

from trimtab_adapter.solvers.program import Program, Solution

Solver = Callable[[Program], Solution | None]


class SolverUnavailable(Exception):
    """The solver cannot solve this program here; the message says why and what would help."""
