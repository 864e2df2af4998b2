"""Are the solvers exact and how long do they take? Exact, HiGHS and Gurobi on the same problems; then one line of JSON.

Random chains of stages × variants × 7 batch sizes with α/β from 20 to 2000, the span of IPA's scaling figure (Gurobi
there: up to 2 s at 10 × 10). Thousands of small chains and DAGs are compared with brute force. The exact solver runs
three times on each, and the bars hold the best processor time to account: it has one thread, so that is what the clock
shows where nothing else runs. The clock's own figures stand beside it.
"""

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

from tests.adapter.problems import a_large_graph, a_large_program, a_program, brute_force, with_accelerators
from trimtab_adapter.solvers import exact, gurobi, highs
from trimtab_adapter.solvers.program import Program, Solution, SolverUnavailable, objective_weights
from trimtab_adapter.solvers.program_arrays import to_arrays
from trimtab_pipelines.result_line import ResultLine, Threshold, threshold
from trimtab_pipelines.spec import Objective

REPEATS = 3
SMALL_INSTANCES = {"exact": 4000, "exact, search alone": 4000, "HiGHS": 400, "Gurobi": 400}
LIMIT_SECONDS = 15.0  # for one problem; beyond it HiGHS and Gurobi report the gap that is left
SHARE_SECONDS = 25.0  # for all problems of one size by one of them
Figures = dict[str, float | str]
Rivals = dict[str, Callable[[Program], Solution | None]]
console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class Size:
    """Problems of one size, and what they are held to."""

    name: str
    count: int
    make: Callable[[int], Program]


@dataclass(slots=True)
class Timed:
    """What one solver did with the problems of one size."""

    seconds: list[float] = field(default_factory=list)  # by the clock
    on_processor: list[float] = field(default_factory=list)
    objectives: dict[int, float | None] = field(default_factory=dict)  # by seed; None where infeasible
    largest_gap: float = 0.0
    unproven: int = 0  # ended by the time limit
    reason: str = ""  # why it did not take part

    def quantile_ms(self, q: float) -> float:
        """A quantile of the time to solve by the clock, in milliseconds."""
        return _quantile_ms(self.seconds, q)

    def processor_ms(self, q: float) -> float:
        """A quantile of the time to solve on the processor, in milliseconds."""
        return _quantile_ms(self.on_processor, q)


def _quantile_ms(seconds: list[float], q: float) -> float:
    return 1000 * float(np.quantile(seconds, q)) if seconds else float("nan")


MAX_ACCURACY = objective_weights(Objective(goal="MaxAccuracy"))
MIN_COST = objective_weights(Objective(goal="MinCost", accuracy_floor=0.15))
SIZES = (
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
RIVALS: Rivals = {
    "HiGHS": lambda program: highs.solve(program, LIMIT_SECONDS),
    "Gurobi": lambda program: gurobi.solve(program, LIMIT_SECONDS),
}


def main() -> int:
    """Measure, compare, print; 1 where a bar is missed."""
    figures: Figures = {}
    largest, gap = 0.0, 0.0
    for size in SIZES:
        timed = {"exact": _exact(size)} | {name: _rival(size, name, solve) for name, solve in RIVALS.items()}
        _print(size, timed)
        for name, one in timed.items():
            figures |= _figures(size, name, one)
            largest = max(largest, _difference(timed["exact"], one))
        gap = max(gap, timed["exact"].largest_gap)
    figures |= {"largest_difference": largest, "largest_gap_of_exact": gap}
    figures |= _brute_force() | _licence()
    outcome = ResultLine(name="bench-solver", figures=figures, bars=_bars(figures))
    for each in outcome.bars:
        console.print(f"{'holds' if each.holds else 'MISSED'}: {each.bar} {each.value:.6g} {each.bound}")
    outcome.print()
    return 0 if outcome.holds else 1


def _bars(figures: Figures) -> tuple[Threshold, ...]:
    bounds = {
        "10x10x7_exact_p99_processor_ms": 30.0,
        "10x10x7_tight_exact_p99_processor_ms": 30.0,
        "3x5x7_exact_p99_processor_ms": 2.0,
        "20x20x7_exact_p50_processor_ms": 500.0,
        "largest_difference": 1e-6,
        "largest_gap_of_exact": 1e-6,
        "brute_force_largest_difference": 1e-6,
    }
    measured = [threshold(name, float(figures[name]), "<=", bound) for name, bound in bounds.items()]
    gain = float(figures["pool_joint_objective"]) - float(figures["pool_best_split_objective"])
    return (*measured, threshold("pool_joint_gain_over_best_split", gain, ">=", 1e-6))


def _exact(size: Size) -> Timed:
    timed = Timed()
    exact.solve(size.make(0))  # the first call pays for numpy's own start
    for seed in _shown(range(size.count), f"{size.name} exact"):
        program = size.make(seed)
        spent, worked = [], []
        for _ in range(REPEATS):
            started, working = time.perf_counter(), time.process_time()
            found = exact.solve(program)
            spent.append(time.perf_counter() - started)
            worked.append(time.process_time() - working)
        timed.seconds.append(min(spent))
        timed.on_processor.append(min(worked))
        _note(timed, seed, found)
    return timed


def _rival(size: Size, name: str, solve: Callable[[Program], Solution | None]) -> Timed:
    """Solve the same problems, as many as the time allows."""
    timed, until = Timed(), time.perf_counter() + SHARE_SECONDS
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"{size.name} {name}", total=size.count)
        for seed in range(size.count):
            program = size.make(seed)
            started, working = time.perf_counter(), time.process_time()
            if started > until:
                break
            try:
                found = solve(program)
            except SolverUnavailable as reason:
                timed.reason = str(reason)
                break
            timed.seconds.append(time.perf_counter() - started)
            timed.on_processor.append(time.process_time() - working)
            if timed.seconds[-1] >= LIMIT_SECONDS:
                timed.unproven += 1
            else:
                _note(timed, seed, found)
            progress.advance(task)
    return timed


def _note(timed: Timed, seed: int, found: Solution | None) -> None:
    timed.objectives[seed] = None if found is None else found.objective
    timed.largest_gap = max(timed.largest_gap, 0.0 if found is None else found.gap)


def _difference(one: Timed, other: Timed) -> float:
    """The largest difference of objectives; disagreement about feasibility is infinite."""
    return max((_apart(one.objectives[seed], found) for seed, found in other.objectives.items()), default=0.0)


def _apart(one: float | None, other: float | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    return abs(one - other)


def _print(size: Size, timed: dict[str, Timed]) -> None:
    table = Table(
        "solver", "problems", "p50 ms", "p99 ms", "max ms", "p99 on processor", "unproven", "differs by", box=None
    )
    table.title, table.title_justify = size.name, "left"
    for name, one in timed.items():
        quantiles = [f"{one.quantile_ms(q):.2f}" for q in (0.5, 0.99, 1.0)] + [f"{one.processor_ms(0.99):.2f}"]
        apart = one.reason or f"{_difference(timed['exact'], one):.1e}"
        table.add_row(name, str(len(one.seconds)), *quantiles, str(one.unproven), apart)
    console.print(table)


def _figures(size: Size, name: str, timed: Timed) -> Figures:
    if timed.reason:
        return {f"{size.name}_{name}": timed.reason}
    figures: Figures = {}
    for q in (0.5, 0.99):
        figures[f"{size.name}_{name}_p{100 * q:g}_ms"] = round(timed.quantile_ms(q), 3)
        figures[f"{size.name}_{name}_p{100 * q:g}_processor_ms"] = round(timed.processor_ms(q), 3)
    return figures | {
        f"{size.name}_{name}_problems": len(timed.seconds),
        f"{size.name}_{name}_unproven": timed.unproven,
    }


def _brute_force() -> Figures:
    """Compare all with brute force on small problems."""
    largest, compared = 0.0, 0
    for name, solve in {"exact": exact.solve, "exact, search alone": _search_alone, **RIVALS}.items():
        for seed in _shown(range(SMALL_INSTANCES[name]), f"brute force {name}"):
            program = a_program(10_000 + seed)
            best = brute_force(program)
            try:
                found = solve(program)
            except SolverUnavailable:
                break
            compared += 1
            objective = None if best is None else program.objective(best)
            largest = max(largest, _apart(objective, None if found is None else found.objective))
    console.print(f"brute force: {compared} problems compared, the objectives differ by at most {largest:.1e}")
    return {"brute_force_problems": compared, "brute_force_largest_difference": largest}


def _search_alone(program: Program) -> Solution | None:
    """Solve as if there were more choices than can be compared all at once."""
    table = to_arrays(program)
    return None if table is None else exact.search(program, table)


def _licence() -> Figures:
    """Show what Gurobi's free licence prevents."""
    program = a_large_program(0, 60, 30)
    try:
        gurobi.solve(program, LIMIT_SECONDS)
        words = "none met at 60 stages of 30 variants"
    except SolverUnavailable as reason:
        words = str(reason)
    console.print(f"limit of Gurobi: {words}")
    return {"gurobi_limit": words}


def _shown(seeds: Iterable[int], what: str) -> Iterable[int]:
    return track(list(seeds), what, console=console, transient=True)


if __name__ == "__main__":
    sys.exit(main())
