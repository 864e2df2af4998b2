"""How long does the exact solver take, and is it exact? The last line is the outcome as JSON.

Random chains of 10 stages × 10 variants × 7 batch sizes with α/β from 20 to 2000, the span of IPA's scaling figure
(Gurobi there: up to 2 s); smaller and larger ones, and ones with a binding budget, beside them.
"""

import sys
import time
from collections.abc import Callable

import numpy as np

from tests.adapter.problems import a_large_program, a_program, brute_force
from trimtab_adapter.program import Program
from trimtab_adapter.solvers.exact import solve
from trimtab_pipelines.outcome import Outcome, bar

INSTANCES = 200
SMALL_INSTANCES = 400
LARGE_INSTANCES = 20
SECOND_MARK_SECONDS = 0.030  # to be reached by p99; here a figure beside the first mark's bar


def main() -> int:
    """Measure, compare with brute force, print; 1 where a bar is missed."""
    sizes: dict[str, tuple[int, Callable[[int], Program]]] = {
        "3x5x7": (INSTANCES, lambda seed: a_large_program(seed, 3, 5)),
        "10x10x7": (INSTANCES, a_large_program),
        "10x10x7_budget": (INSTANCES, lambda seed: a_large_program(seed, cores=60.0)),
        "20x20x7": (LARGE_INSTANCES, lambda seed: a_large_program(seed, 20, 20)),
    }
    figures: dict[str, float] = {}
    for name, (count, make) in sizes.items():
        spent, on_processor, infeasible = _measure(count, make)
        figures |= {
            f"{name}_p50_seconds": float(np.median(spent)),
            f"{name}_p99_seconds": float(np.quantile(spent, 0.99)),
            f"{name}_max_seconds": max(spent),
            f"{name}_p99_cpu_seconds": float(np.quantile(on_processor, 0.99)),
            f"{name}_infeasible": infeasible,
        }
        median, worst = np.median(spent) * 1e3, np.quantile(spent, 0.99) * 1e3
        print(f"{name}: {count} instances, p50 {median:.2f} ms, p99 {worst:.2f} ms")
    figures["10x10x7_second_mark_seconds"] = SECOND_MARK_SECONDS
    difference = _largest_difference()
    figures |= {"brute_force_instances": SMALL_INSTANCES, "largest_difference": difference}
    p99 = figures["10x10x7_p99_seconds"]
    bars = (
        bar("10x10x7_p99_seconds", p99, "<=", 1.0),
        bar("largest_difference_from_brute_force", difference, "<=", 1e-6),
    )
    outcome = Outcome(name="bench-solver", figures=figures, bars=bars)
    outcome.print()
    return 0 if outcome.holds else 1


def _measure(count: int, make: Callable[[int], Program]) -> tuple[list[float], list[float], int]:
    """Return the seconds of each solve by the clock and on the processor, and how many had no feasible plan."""
    solve(make(0))  # the first call pays for numpy's own start
    spent, on_processor, infeasible = [], [], 0
    for seed in range(count):
        program = make(seed)
        started, worked = time.perf_counter(), time.process_time()
        solution = solve(program)
        spent.append(time.perf_counter() - started)
        on_processor.append(time.process_time() - worked)
        infeasible += solution is None
    return spent, on_processor, infeasible


def _largest_difference() -> float:
    """Compare with brute force; a wrong answer about feasibility counts as infinite."""
    largest = 0.0
    for seed in range(SMALL_INSTANCES):
        program = a_program(10_000 + seed)
        expected, found = brute_force(program), solve(program)
        if expected is None or found is None:
            largest = max(largest, 0.0 if expected is None and found is None else float("inf"))
        else:
            largest = max(largest, abs(program.objective(expected) - found.objective))
    return largest


if __name__ == "__main__":
    sys.exit(main())
