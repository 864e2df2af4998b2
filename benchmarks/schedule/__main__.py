"""Benchmark of deadline schedules: random queues, solved as the router solves them and exactly.

Times are processor times of one process.
"""

import sys
import time
from collections.abc import Sequence

import numpy as np
from rich.console import Console

from benchmarks.schedule import deciding
from tests.router.schedules import (
    a_queue,
    a_queue_of_batches,
    all_can_be_served,
    exact,
    kept,
    senses,
)
from tests.router.token_queues import a_random_view, eight_points
from trimtab_pipelines.result_line import ResultLine, threshold
from trimtab_router.scheduling.policies import token_adaptive
from trimtab_router.scheduling.policies.deadline_schedule import Job, solve
from trimtab_router.scheduling.policies.interface import SchedulerView
from trimtab_router.scheduling.policies.token_adaptive import MAX_BATCHES
from trimtab_router.scheduling.policies.token_batches import candidate_batches

CASES, TIMED, COMPARED = 10_000, 400, 40
DECIDED, DECIDED_ROWS = 100, 1_400
Figures = dict[str, float | str]
console = Console(highlight=False)


def main() -> int:
    """Measure all; 1 where a bar is missed."""
    figures = _timed() | _decided() | _compared() | _feasible()
    bars = (
        threshold(
            "40 batches gathered from a queue, 8 points: whole decision, p99 processor ms",
            float(figures["tokens_p99_ms"]),
            "<=",
            3.0,
        ),
        threshold("20 jobs, all strategies, p99 processor ms", float(figures["jobs_p99_ms"]), "<=", 2.0),
        threshold("20 jobs of 1 to 15 rows, whole decision, p99 ms", float(figures["small_p99_ms"]), "<=", 2.0),
        threshold("20 jobs of 1 to 64 rows, whole decision, p99 ms", float(figures["large_p99_ms"]), "<=", 2.0),
        threshold("40 batches, 8 points, p99 processor ms", float(figures["batches_p99_ms"]), "<=", 3.0),
        threshold("jobs: mean share of the exact optimum missed", float(figures["jobs_mean_gap"]), "<=", 0.001),
        threshold("batches: mean share of the exact optimum missed", float(figures["batches_mean_gap"]), "<=", 0.001),
        threshold("queues that could all be served and were not", float(figures["missed"]), "<=", 0.0),
    )
    outcome = ResultLine(name="bench-schedule", figures=figures, bars=bars)
    for each in bars:
        console.print(f"{'holds' if each.holds else 'MISSED'}: {each.bar} {each.value:.4g} {each.bound}")
    outcome.print()
    return 0 if outcome.holds else 1


def _timed() -> Figures:
    rng, sizes = np.random.default_rng(0), senses()
    jobs = [a_queue(rng, 20, sizes, float(rng.uniform(0.5, 2.0)), worth=1.0) for _ in range(TIMED)]
    batches = [a_queue_of_batches(rng, 40, 8, float(rng.uniform(0.7, 3.0))) for _ in range(TIMED)]
    figures: Figures = {}
    for name, queues in (("jobs", jobs), ("batches", batches)):
        spent = [min(_spent(queue) for _ in range(3)) for queue in queues]
        figures |= {
            f"{name}_p50_ms": 1e3 * float(np.median(spent)),
            f"{name}_p99_ms": 1e3 * float(np.quantile(spent, 0.99)),
        }
    return figures | _of_tokens(rng)


def _of_tokens(rng: np.random.Generator) -> Figures:
    """Of whole decisions by utility times accuracy: what waits, gathered into 40 batches of mixed tasks, and solved."""
    views = [a_random_view(rng, DECIDED_ROWS, eight_points()) for _ in range(DECIDED)]
    batches = float(np.mean([len(candidate_batches(view, MAX_BATCHES)) for view in views]))
    spent = [min(_decision_seconds(view) for _ in range(3)) for view in views]
    return {
        "tokens_batches": batches,
        "tokens_p50_ms": 1e3 * float(np.median(spent)),
        "tokens_p99_ms": 1e3 * float(np.quantile(spent, 0.99)),
    }


def _decision_seconds(view: SchedulerView) -> float:
    begun = time.process_time()
    token_adaptive.decide(view)
    return time.process_time() - begun


def _decided() -> Figures:
    """As the router goes on once the books are written, which it does beside its loop when a plan begins."""
    figures: Figures = {"prepare_seconds": deciding.prepare_seconds()}
    for name, rows in (("small", (1, 15)), ("large", (1, 64))):
        spent = deciding.milliseconds(rows)
        figures |= {
            f"{name}_p50_ms": float(np.median(spent)),
            f"{name}_p99_ms": float(np.quantile(spent, 0.99)),
            f"{name}_first_ms": spent[0],
        }
    return figures


def _spent(queue: Sequence[Job]) -> float:
    begun = time.process_time()
    solve(queue, 0.0)
    return time.process_time() - begun


def _compared() -> Figures:
    rng, sizes = np.random.default_rng(1), senses()
    queues = {
        "jobs": [a_queue(rng, 12, sizes, float(rng.uniform(0.5, 2.0))) for _ in range(COMPARED)],
        "batches": [a_queue_of_batches(rng, 24, 8, float(rng.uniform(0.7, 3.0))) for _ in range(COMPARED)],
    }
    figures: Figures = {}
    for name, drawn in queues.items():
        gaps = [1.0 - kept(queue, solve(queue, 0.0)) / exact(queue)[1] for queue in drawn]
        figures |= {f"{name}_mean_gap": float(np.mean(gaps)), f"{name}_greatest_gap": float(max(gaps))}
    return figures


def _feasible() -> Figures:
    """Of random queues that can all be served: how many the schedule drops anybody from."""
    rng, sizes, missed, possible = np.random.default_rng(2), senses(16), 0, 0
    for _ in range(CASES):
        queue = a_queue(rng, int(rng.integers(1, 13)), sizes, float(np.exp(rng.uniform(0.0, 4.0))), worth=1.0)
        found = solve(queue, 0.0, cells=64)
        if all_can_be_served(queue):
            possible += 1
            missed += found.served < len(queue)
    return {"cases": CASES, "all_can_be_served": possible, "missed": missed}


if __name__ == "__main__":
    sys.exit(main())
