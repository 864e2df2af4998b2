"""Fidelity benchmark of the simulator."""
