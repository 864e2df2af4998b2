"""Batch enlargement: larger batches without more replicas, as far as the latency SLO allows.

The batch size is an upper bound. The objective's small price of batch size selects the smallest batch that carries the
forecast. While that price is only a tie-breaker, a larger bound with the same replicas costs nothing and absorbs load
above the forecast until the next decision.
"""

from collections.abc import Sequence

from trimtab_adapter.planning.explain import describe_option
from trimtab_adapter.planning.planning_problem import PlanningProblem
from trimtab_adapter.solvers.program import TIE_BREAK, Option, Program
from trimtab_pipelines.plan import StagePlan

SHARE_OF_SLO = 0.8
"""The planned latency may grow up to this share of the SLO."""


def enlarge_batches(problem: PlanningProblem, program: Program, choice: Sequence[Option]) -> tuple[Option, ...]:
    """Raise the batch sizes of changing stages in turn as far as latency allows; models and replicas stay."""
    choice = list(choice)
    if program.weights.batch > TIE_BREAK * max(program.weights.accuracy, 1.0):
        return tuple(choice)
    ladders = [
        _larger(stage.options, option) if _changes(problem.running(stage.name), option) else []
        for stage, option in zip(program.stages, choice, strict=True)
    ]
    while any(ladders):
        # Smallest batch first, so that the stages grow together.
        k = min((k for k, ladder in enumerate(ladders) if ladder), key=lambda k: (choice[k].batch_size, k))
        larger = ladders[k].pop(0)
        trial = [*choice[:k], larger, *choice[k + 1 :]]
        if program.latency_seconds(trial) <= SHARE_OF_SLO * program.slo_seconds:
            choice = trial
        else:
            ladders[k] = []
    return tuple(choice)


def _changes(running: StagePlan | None, option: Option) -> bool:
    return running is None or describe_option(running) != describe_option(option)


def _larger(options: tuple[Option, ...], option: Option) -> list[Option]:
    """The same model and replicas with larger batches and a higher throughput, smallest first."""
    larger = [
        other._replace(penalty=option.penalty)
        for other in options
        if (other.model, other.replicas, other.other_groups) == (option.model, option.replicas, option.other_groups)
        and other.batch_size > option.batch_size
        and other.throughput_rps > option.throughput_rps
    ]
    return sorted(larger, key=lambda other: other.batch_size)
