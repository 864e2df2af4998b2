"""Benchmark of deadline schedules: the router's solver on random queues against the exact optimum.

Times are processor times of one process.
"""

import time
from collections.abc import Sequence

import numpy as np

from benchmarks.harness.report import Report
from tests.router import modality_mix_decisions
from tests.router.schedules import (
    a_queue,
    a_queue_of_batches,
    all_can_be_served,
    exact,
    kept,
    senses,
)
from tests.router.token_queues import a_random_view, eight_points
from trimtab_router.scheduling.policies import token_adaptive
from trimtab_router.scheduling.policies.deadline_schedule import Job, solve
from trimtab_router.scheduling.policies.interface import SchedulerView
from trimtab_router.scheduling.policies.token_adaptive import MAX_BATCHES
from trimtab_router.scheduling.policies.token_options import candidate_batches

CASES, TIMED, COMPARED = 10_000, 400, 40
DECIDED, DECIDED_ROWS = 100, 1_400
BOUNDS = (
    ("40 batches gathered from a queue, 8 points: whole decision, p99 processor ms", "tokens_p99_ms", 3.0),
    ("20 jobs, all strategies, p99 processor ms", "jobs_p99_ms", 2.0),
    ("20 jobs of 1 to 15 rows, whole decision, p99 ms", "small_p99_ms", 2.0),
    ("20 jobs of 1 to 64 rows, whole decision, p99 ms", "large_p99_ms", 2.0),
    ("40 batches, 8 points, p99 processor ms", "batches_p99_ms", 3.0),
    ("jobs: mean share of the exact optimum missed", "jobs_mean_gap", 0.001),
    ("batches: mean share of the exact optimum missed", "batches_mean_gap", 0.001),
    ("queues that could all be served and were not", "missed", 0.0),
)
Figures = dict[str, float | str]


def main() -> int:
    report = Report("bench-schedule")
    figures = _measure_solver() | _measure_mix_decisions() | _compare_with_optimum() | _count_missed_queues()
    report.add(figures)
    for name, figure, bound in BOUNDS:
        report.hold(name, float(figures[figure]), "<=", bound)
    return report.finish()


def _measure_solver() -> Figures:
    rng, sizes = np.random.default_rng(0), senses()
    jobs = [a_queue(rng, 20, sizes, float(rng.uniform(0.5, 2.0)), worth=1.0) for _ in range(TIMED)]
    batches = [a_queue_of_batches(rng, 40, 8, float(rng.uniform(0.7, 3.0))) for _ in range(TIMED)]
    figures: Figures = {}
    for name, queues in (("jobs", jobs), ("batches", batches)):
        seconds = [min(_solve_seconds(queue) for _ in range(3)) for queue in queues]
        figures |= {
            f"{name}_p50_ms": 1e3 * float(np.median(seconds)),
            f"{name}_p99_ms": 1e3 * float(np.quantile(seconds, 0.99)),
        }
    return figures | _measure_token_decisions(rng)


def _measure_token_decisions(rng: np.random.Generator) -> Figures:
    """Time decisions of TokenAdaptive, each on a queue that forms 40 batches of mixed tasks."""
    views = [a_random_view(rng, DECIDED_ROWS, eight_points()) for _ in range(DECIDED)]
    batches = float(np.mean([len(candidate_batches(view, MAX_BATCHES)) for view in views]))
    seconds = [min(_decision_seconds(view) for _ in range(3)) for view in views]
    return {
        "tokens_batches": batches,
        "tokens_p50_ms": 1e3 * float(np.median(seconds)),
        "tokens_p99_ms": 1e3 * float(np.quantile(seconds, 0.99)),
    }


def _decision_seconds(view: SchedulerView) -> float:
    started = time.process_time()
    token_adaptive.decide(view)
    return time.process_time() - started


def _measure_mix_decisions() -> Figures:
    """Time decisions of ModalityMix with precomputed tables, as the router makes them after a plan took effect."""
    figures: Figures = {"prepare_seconds": modality_mix_decisions.prepare_seconds()}
    for name, rows in (("small", (1, 15)), ("large", (1, 64))):
        milliseconds = modality_mix_decisions.decision_milliseconds(rows)
        figures |= {
            f"{name}_p50_ms": float(np.median(milliseconds)),
            f"{name}_p99_ms": float(np.quantile(milliseconds, 0.99)),
            f"{name}_first_ms": milliseconds[0],
        }
    return figures


def _solve_seconds(queue: Sequence[Job]) -> float:
    started = time.process_time()
    solve(queue, 0.0)
    return time.process_time() - started


def _compare_with_optimum() -> Figures:
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


def _count_missed_queues() -> Figures:
    """Count the feasible random queues of which the schedule drops a job."""
    rng, sizes, missed, possible = np.random.default_rng(2), senses(16), 0, 0
    for _ in range(CASES):
        queue = a_queue(rng, int(rng.integers(1, 13)), sizes, float(np.exp(rng.uniform(0.0, 4.0))), worth=1.0)
        schedule = solve(queue, 0.0, cells=64)
        if all_can_be_served(queue):
            possible += 1
            missed += schedule.served < len(queue)
    return {"cases": CASES, "all_can_be_served": possible, "missed": missed}
