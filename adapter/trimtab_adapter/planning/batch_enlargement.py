"""Batch enlargement: larger batches without more replicas, as far as the latency SLO allows.

The batch size is an upper bound. The objective's small price of batch size selects the smallest batch that carries the
forecast. While that price is only a tie-breaker, a larger bound with the same replicas costs nothing and absorbs load
above the forecast until the next decision. The default policy may form still larger batches while more rows wait
(`max_batch_size`).
"""

from collections.abc import Iterable, Sequence
from math import inf

from trimtab_adapter.planning.candidate import most_rows, switchable_variants
from trimtab_adapter.planning.explain import describe_option
from trimtab_adapter.planning.planning_problem import PlanningProblem, point_profile, service_ratio
from trimtab_adapter.planning.program_builder import batch_sizes
from trimtab_adapter.solvers.program import TIE_BREAK, Option, Program, Weights, objective_weights
from trimtab_pipelines.model_spec import max_rows
from trimtab_pipelines.plan import StagePlan
from trimtab_pipelines.stages import Stage

SHARE_OF_SLO = 0.8
"""The planned latency may grow up to this share of the SLO."""


def enlarge_batches(problem: PlanningProblem, program: Program, choice: Sequence[Option]) -> tuple[Option, ...]:
    """Raise the batch sizes of changing stages in turn as far as latency allows; models and replicas stay."""
    choice = list(choice)
    if _batches_cost(program.weights):
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


def sizes_above(problem: PlanningProblem, stage: Stage, option: Option) -> list[int]:
    """The batch sizes above an option's, ascending, that the policy and all variants of its replicas may serve."""
    spec, variant = problem.spec, stage.variant(option.variant)
    fixed = stage.generates or stage.pin.batch_size is not None or option.other_groups
    if fixed or not spec.policy_traits.enlarges_batches or _batches_cost(objective_weights(spec.objective)):
        return []
    hosted = switchable_variants(spec, stage, variant) or {variant.name}
    request_rows = max_rows(spec, stage)
    most = min(most_rows(stage.variant(name), request_rows) for name in hosted)
    return [size for size in batch_sizes(spec, stage, stage.pin) if option.batch_size < size <= most]


def max_batch_size(problem: PlanningProblem, stage: Stage, plan: StagePlan, sizes: Iterable[int]) -> int | None:
    """The largest of some batch sizes of which two take at most the planned latency at the fastest point.

    A row may wait for the batch that runs when it arrives, and then for its own.
    """
    variant = stage.variant(plan.variant)
    profile = point_profile(problem, stage, variant, variant.point(plan.operating_point))
    ratio = 1.0 if profile is None else service_ratio(problem, stage, variant, profile)
    profiled = [point.service_seconds for point in plan.points if point.service_seconds]
    seconds = {size: ratio * min((each[size] for each in profiled), default=inf) for size in sizes}
    return max((size for size in seconds if 2.0 * seconds[size] <= plan.latency_seconds), default=None)


def _batches_cost(weights: Weights) -> bool:
    """Whether the objective's price of batch size is more than a tie-breaker."""
    return weights.batch > TIE_BREAK * max(weights.accuracy, 1.0)


def _changes(running: StagePlan | None, option: Option) -> bool:
    return running is None or describe_option(running) != describe_option(option)


def _larger(options: Sequence[Option], option: Option) -> list[Option]:
    """The same model and replicas with larger batches and a higher throughput, smallest first."""
    larger = [
        other._replace(penalty=option.penalty)
        for other in options
        if (other.model, other.replicas, other.other_groups) == (option.model, option.replicas, option.other_groups)
        and other.batch_size > option.batch_size
        and other.throughput_rps > option.throughput_rps
    ]
    return sorted(larger, key=lambda other: other.batch_size)
