"""Benchmark of deadline schedules: time of the router's solver and of whole decisions on random queues.

Times are processor times of one process.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from benchmarks.harness.report import Report
from tests.router import modality_mix_decisions
from tests.router.schedules import a_queue, a_queue_of_batches, senses
from tests.router.token_queues import a_random_view, eight_points
from trimtab_router.scheduling.policies import token_adaptive
from trimtab_router.scheduling.policies.deadline_schedule import solve
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
    """Time the solver, and decisions of TokenAdaptive on queues that form 40 batches of mixed tasks."""
    rng, sizes = np.random.default_rng(0), senses()
    jobs = [a_queue(rng, 20, sizes, float(rng.uniform(0.5, 2.0)), worth=1.0) for _ in range(TIMED)]
    batches = [a_queue_of_batches(rng, 40, 8, float(rng.uniform(0.7, 3.0))) for _ in range(TIMED)]
    figures = _percentiles("jobs", [_least_ms(partial(solve, queue, 0.0)) for queue in jobs])
    figures |= _percentiles("batches", [_least_ms(partial(solve, queue, 0.0)) for queue in batches])
    views = [a_random_view(rng, DECIDED_ROWS, eight_points()) for _ in range(DECIDED)]
    figures["tokens_batches"] = float(np.mean([len(candidate_batches(view, MAX_BATCHES)) for view in views]))
    return figures | _percentiles("tokens", [_least_ms(partial(token_adaptive.decide, view)) for view in views])


def _measure_mix_decisions() -> Figures:
    """Time decisions of ModalityMix with precomputed tables, as the router makes them after a plan took effect."""
    figures: Figures = {"prepare_seconds": modality_mix_decisions.prepare_seconds()}
    for name, rows in (("small", (1, 15)), ("large", (1, 64))):
        milliseconds = modality_mix_decisions.decision_milliseconds(rows)
        figures |= _percentiles(name, milliseconds) | {f"{name}_first_ms": milliseconds[0]}
    return figures


def _percentiles(name: str, milliseconds: Sequence[float]) -> Figures:
    return {f"{name}_p{percent}_ms": float(np.percentile(milliseconds, percent)) for percent in (50, 99)}


def _least_ms(call: Callable[[], object]) -> float:
    """Return the least processor time of three calls."""
    times = []
    for _ in range(3):
        started = time.process_time()
        call()
        times.append(1e3 * (time.process_time() - started))
    return min(times)
