"""Solvers of the program; one signature, `solve(program) -> Solution | None`."""
