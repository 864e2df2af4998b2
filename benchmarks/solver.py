"""Benchmark of the planning solvers: exact, HiGHS and Gurobi on the same problems.

Problems are random chains of stages × variants × 7 batch sizes with α/β from 20 to 2000, the span of IPA's scaling
figure (Gurobi there: up to 2 s at 10 × 10), or stages of five hosted variants with mixes and cascades, on cores or also
on three kinds of GPUs; the decisions include building the program. The exact solver runs three times on each,
and its best processor time counts: it has one thread, so that is its wall-clock time on an idle machine.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from rich.progress import track

from benchmarks.harness.report import Report, print_table
from tests.adapter.problems import a_hosting_problem, a_large_graph, a_large_program, with_accelerators
from trimtab.options import console
from trimtab_adapter.planning.program_builder import build_program
from trimtab_adapter.solvers import exact, gurobi, highs
from trimtab_adapter.solvers.program import Solution, SolverUnavailable, objective_weights
from trimtab_pipelines.spec import Objective

LIMIT_SECONDS = 15.0
"""For one problem; HiGHS and Gurobi then report the gap that is left."""
SHARE_SECONDS = 25.0
"""For all problems of one size by one baseline."""
MAX_DIFFERENCE = 1e-6
MAX_PROCESSOR_MS = {
    "10x10x7_exact_p99_processor_ms": 30.0,
    "10x10x7_tight_exact_p99_processor_ms": 30.0,
    "3x5x7_exact_p99_processor_ms": 2.0,
    "4x5x7_flavors_exact_p99_processor_ms": 20.0,
    "20x20x7_exact_p50_processor_ms": 500.0,
    "4x5x7_mixes_decision_p99_processor_ms": 10.0,
    "4x5x7_flavors_decision_p99_processor_ms": 20.0,
}
Solve = Callable[[Any], Solution | None]


@dataclass(frozen=True, slots=True)
class Size:
    """Problems of one size, by seed."""

    name: str
    count: int
    make: Callable[[int], Any]


@dataclass(slots=True)
class SolverRun:
    """Results of one solver for the problems of one size."""

    wall_seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    objectives: dict[int, float | None] = field(default_factory=dict)
    """By seed; None if infeasible."""
    largest_gap: float = 0.0
    unproven: int = 0
    """Problems that the time limit ended."""
    unavailable: str = ""
    """Why the solver did not run."""

    def record(self, seed: int, solution: Solution | None) -> None:
        self.objectives[seed] = None if solution is None else solution.objective
        self.largest_gap = max(self.largest_gap, 0.0 if solution is None else solution.gap)

    def difference(self, other: "SolverRun") -> float:
        """The largest difference to another solver's objectives; infinite if they disagree about feasibility."""
        pairs = ((self.objectives[seed], objective) for seed, objective in other.objectives.items())
        return max((_difference(*pair) for pair in pairs), default=0.0)

    def figures(self, name: str) -> dict[str, float | str]:
        if self.unavailable:
            return {name: self.unavailable}
        figures: dict[str, float | str] = {
            f"{name}_problems": len(self.wall_seconds),
            f"{name}_unproven": self.unproven,
        }
        for q in (0.5, 0.99):
            figures[f"{name}_p{100 * q:g}_ms"] = round(_quantile_ms(self.wall_seconds, q), 3)
            figures[f"{name}_p{100 * q:g}_processor_ms"] = round(_quantile_ms(self.processor_seconds, q), 3)
        return figures


def _quantile_ms(seconds: list[float], q: float) -> float:
    return 1000 * float(np.quantile(seconds, q)) if seconds else float("nan")


def _difference(one: float | None, other: float | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    return abs(one - other)


MAX_ACCURACY = objective_weights(Objective(goal="MaxAccuracy"))
MIN_COST = objective_weights(Objective(goal="MinCost", accuracy_floor=0.15))
SIZES = (
    Size("4x5x7_mixes", 200, lambda seed: build_program(a_hosting_problem(seed))),
    Size("4x5x7_flavors", 200, lambda seed: build_program(a_hosting_problem(seed, flavors=3))),
    Size("3x5x7", 200, lambda seed: a_large_program(seed, 3, 5)),
    Size("10x10x7", 200, a_large_program),
    Size("10x10x7_tight", 200, lambda seed: a_large_program(seed, slo_share=0.2)),
    Size("10x10x7_budget", 200, lambda seed: a_large_program(seed, cores=60.0)),
    Size("10x10x7_gpus", 60, lambda seed: with_accelerators(a_large_program(seed, slo_share=0.4), 4)),
    Size("10x10x7_max_accuracy", 60, lambda seed: replace(a_large_program(seed, cores=80.0), weights=MAX_ACCURACY)),
    Size("10x10x7_min_cost", 60, lambda seed: replace(a_large_program(seed), weights=MIN_COST, accuracy_floor=0.15)),
    Size("dag_8x8", 100, a_large_graph),
    Size("20x20x7", 40, lambda seed: a_large_program(seed, 20, 20)),
)
DECISIONS: Mapping[str, Callable[[int], Any]] = {
    "4x5x7_mixes": lambda seed: partial(build_program, a_hosting_problem(seed)),
    "4x5x7_flavors": lambda seed: partial(build_program, a_hosting_problem(seed, flavors=3)),
}
BASELINES: dict[str, Solve] = {
    "HiGHS": partial(highs.solve, time_limit_seconds=LIMIT_SECONDS),
    "Gurobi": partial(gurobi.solve, time_limit_seconds=LIMIT_SECONDS),
}
COLUMNS = ("solver", "problems", "p50 ms", "p99 ms", "max ms", "p99 on processor", "unproven", "differs by")


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks solver", description=__doc__)
    parser.add_argument("--problems", type=int, default=4000, help="of each size at most")
    most = parser.parse_args().problems
    report = Report("bench-solver")
    largest, gap = 0.0, 0.0
    exact.solve(SIZES[2].make(0))  # the first call pays for numpy's own start
    for size in (replace(size, count=min(size.count, most)) for size in SIZES):
        runs = {"exact": _solve_all(size, "exact", exact.solve, repeats=3, seconds=float("inf"))}
        runs |= {name: _solve_all(size, name, solve) for name, solve in BASELINES.items()}
        print_table(COLUMNS, [_table_row(name, run, runs["exact"]) for name, run in runs.items()], size.name)
        for name, run in runs.items():
            report.add(run.figures(f"{size.name}_{name}"))
            largest = max(largest, runs["exact"].difference(run))
        gap = max(gap, runs["exact"].largest_gap)
    for name, problem_of in DECISIONS.items():
        deciding = Size(name, min(200, most), problem_of)
        decided = _solve_all(deciding, "decision", lambda build: exact.solve(build()), repeats=3, seconds=float("inf"))
        report.add(decided.figures(f"{name}_decision"))
    report.add({"largest_difference": largest, "largest_gap_of_exact": gap})
    for name, bound in MAX_PROCESSOR_MS.items():
        report.hold(name, float(report.figures[name] or 0.0), "<=", bound)
    for name in ("largest_difference", "largest_gap_of_exact"):
        report.hold(name, float(report.figures[name] or 0.0), "<=", MAX_DIFFERENCE)
    return report.finish()


def _solve_all(size: Size, name: str, solve: Solve, repeats: int = 1, seconds: float = SHARE_SECONDS) -> SolverRun:
    """Solve as many problems as the time allows; the best of the repeats counts."""
    run, end = SolverRun(), time.perf_counter() + seconds
    for seed in track(range(size.count), f"{size.name} {name}", console=console, transient=True):
        if time.perf_counter() > end:
            break
        program = size.make(seed)
        wall, processor = [], []
        for _ in range(repeats):
            started, processor_started = time.perf_counter(), time.process_time()
            try:
                solution = solve(program)
            except SolverUnavailable as reason:
                run.unavailable = str(reason)
                return run
            wall.append(time.perf_counter() - started)
            processor.append(time.process_time() - processor_started)
        run.wall_seconds.append(min(wall))
        run.processor_seconds.append(min(processor))
        if min(wall) >= LIMIT_SECONDS:
            run.unproven += 1
        else:
            run.record(seed, solution)
    return run


def _table_row(name: str, run: SolverRun, reference: SolverRun) -> tuple[str, ...]:
    return (
        name,
        str(len(run.wall_seconds)),
        *(f"{_quantile_ms(run.wall_seconds, q):.2f}" for q in (0.5, 0.99, 1.0)),
        f"{_quantile_ms(run.processor_seconds, 0.99):.2f}",
        str(run.unproven),
        run.unavailable or f"{reference.difference(run):.1e}",
    )
