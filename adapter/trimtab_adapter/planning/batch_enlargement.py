"""Batch enlargement: larger batches without more replicas, as far as the latency SLO allows.

The batch size is an upper bound. The objective's small price of batch size selects the smallest batch that carries the
forecast. While that price is only a tie-breaker, a larger bound with the same replicas costs nothing and absorbs load
above the forecast until the next decision.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from trimtab_adapter.planning.explain import describe_option
from trimtab_adapter.planning.planning_problem import PlanningProblem
from trimtab_adapter.solvers.program import TIE_BREAK, Option, Program
from trimtab_pipelines.plan import StagePlan

SHARE_OF_SLO = 0.8
"""The planned latency may grow up to this share of the SLO; up to the SLO for sizes up to the running one."""


def enlarge_batches(problem: PlanningProblem, program: Program, choice: Sequence[Option]) -> tuple[Option, ...]:
    """Raise the batch sizes of changing stages as far as latency allows, at most to a running size that suffices."""
    if program.weights.batch > TIE_BREAK * max(program.weights.accuracy, 1.0):
        return tuple(choice)
    choice, running = list(choice), [problem.running(stage.name) for stage in program.stages]
    ladders = [
        _larger(stage.options, option, plan)
        for stage, option, plan in zip(program.stages, choice, running, strict=True)
    ]
    while any(ladders):
        # Smallest batch first, so that the stages grow together.
        k = min((k for k, ladder in enumerate(ladders) if ladder), key=lambda k: (choice[k].batch_size, k))
        larger = ladders[k].pop(0)
        trial = [*choice[:k], larger, *choice[k + 1 :]]
        plan = running[k]
        share = SHARE_OF_SLO if plan is None or larger.batch_size > plan.batch_size else 1.0
        if program.latency_seconds(trial) <= share * program.slo_seconds:
            choice = trial
        else:
            ladders[k] = []
    return tuple(choice)


def _larger(options: tuple[Option, ...], option: Option, running: StagePlan | None) -> list[Option]:
    """The same model and replicas with larger batches and a higher throughput, smallest first; none if unchanged."""
    if running is not None and describe_option(running) == describe_option(option):
        return []
    suffices = running is not None and running.batch_size >= option.batch_size
    most = running.batch_size if running is not None and suffices else math.inf
    larger = [
        replace(other, penalty=option.penalty)
        for other in options
        if (other.model, other.replicas) == (option.model, option.replicas)
        and option.batch_size < other.batch_size <= most
        and other.throughput_rps > option.throughput_rps
    ]
    return sorted(larger, key=lambda other: other.batch_size)
