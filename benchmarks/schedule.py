"""Benchmark of deadline schedules: time of the router's solver and of whole decisions on random queues.

Times are processor times of one process.
"""

import time
from collections.abc import Sequence

import numpy as np

from benchmarks.harness.report import Report
from tests.router import modality_mix_decisions
from tests.router.schedules import a_queue, a_queue_of_batches, senses
from tests.router.token_queues import a_random_view, eight_points
from trimtab_router.scheduling.policies import token_adaptive
from trimtab_router.scheduling.policies.deadline_schedule import Job, solve
from trimtab_router.scheduling.policies.interface import SchedulerView
from trimtab_router.scheduling.policies.token_adaptive import MAX_BATCHES
from trimtab_router.scheduling.policies.token_options import candidate_batches

TIMED = 400
DECIDED, DECIDED_ROWS = 100, 1_400
BOUNDS = (
    ("40 batches gathered from a queue, 8 points: whole decision, p99 processor ms", "tokens_p99_ms", 3.0),
    ("20 jobs, all strategies, p99 processor ms", "jobs_p99_ms", 2.0),
    ("20 jobs of 1 to 15 rows, whole decision, p99 ms", "small_p99_ms", 2.0),
    ("20 jobs of 1 to 64 rows, whole decision, p99 ms", "large_p99_ms", 2.0),
    ("40 batches, 8 points, p99 processor ms", "batches_p99_ms", 3.0),
)
Figures = dict[str, float | str]


def main() -> int:
    report = Report("bench-schedule")
    figures = _measure_solver() | _measure_mix_decisions()
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
