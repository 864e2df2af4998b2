"""Solvers of the integer program with one signature, `solve(program) -> Solution | None`."""
