"""Sweeps outside the grid of cells: the weight of accuracy, and the solver's time by stages and variants."""

import time
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.ipa.cells import OURS, Cell
from tests.adapter.problems import a_large_program
from trimtab_adapter.solvers.exact import solve

WEIGHT_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
SWEPT_WORKLOAD = "bursty"

# The paper's own sweep (its figure 14, simulated, bursty): accuracy first, balanced, resources first; cores and PAS.
PUBLISHED_SWEEP: Mapping[str, tuple[tuple[float, float], ...]] = {
    "video": ((25.0, 0.536), (4.8, 0.420), (2.8, 0.341)),
    "audio-qa": ((47.8, 0.547), (17.4, 0.517), (13.2, 0.487)),
    "audio-sent": ((28.2, 0.591), (17.0, 0.568), (11.7, 0.535)),
    "sum-qa": ((32.2, 0.304), (16.8, 0.289), (8.9, 0.267)),
    "nlp": ((184.7, 0.127), (106.8, 0.121), (48.2, 0.106)),
}
# Mean seconds of Gurobi in the public code's own notebook, by stages and variants.
PUBLISHED_SOLVER_SECONDS: Mapping[tuple[int, int], float] = {
    (2, 5): 0.136,
    (5, 5): 0.30,
    (9, 5): 0.68,
    (5, 9): 1.25,
    (9, 9): 2.22,
}
SOLVED_SIZES = ((2, 5), (5, 5), (9, 5), (2, 9), (5, 9), (9, 9), (10, 10))


def sweep_cells(pipelines: Sequence[str], weights: Mapping[str, float], seed: int) -> list[Cell]:
    """The cells of the sweep; `weights` are the pipelines' own."""
    return [
        Cell(pipeline, SWEPT_WORKLOAD, OURS, seed, accuracy_weight=factor * weights[pipeline])
        for pipeline in pipelines
        for factor in WEIGHT_FACTORS
    ]


def solver_seconds(instances: int) -> dict[tuple[int, int], tuple[float, float]]:
    """The median and the longest seconds of the exact solver, by stages and variants; 7 batch sizes each."""
    solve(a_large_program(0, 2, 5))  # the first call pays for numpy's own start
    found = {}
    for stages, variants in SOLVED_SIZES:
        spent = [_seconds(seed, stages, variants) for seed in range(instances)]
        found[stages, variants] = (float(np.median(spent)), max(spent))
    return found


def _seconds(seed: int, stages: int, variants: int) -> float:
    program = a_large_program(seed, stages, variants)
    began = time.perf_counter()
    solve(program)
    return time.perf_counter() - began
