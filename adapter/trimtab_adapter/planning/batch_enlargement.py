"""Larger batches for free: the batch size is only a bound, so what the SLO leaves unused absorbs bursts.

The objective's tiny price of batch size picks the smallest batch that carries the forecast. While that price is no more
than a tie-breaker, a larger bound with the same replicas costs nothing and serves more when the load exceeds its
forecast, which it does until the next decision.
"""

from collections.abc import Container, Sequence
from dataclasses import replace

from trimtab_adapter.solvers.program import TIE_BREAK, Option, Program

SHARE_OF_SLO = 0.8
"""The planned latency may grow up to here."""


def enlarge_batches(program: Program, choice: Sequence[Option], movable: Container[str]) -> tuple[Option, ...]:
    """The choice with batch sizes raised, in turn, as far as latency allows; models and replicas stay.

    Only stages in `movable` are touched: one that goes on as before should not change for this alone.
    """
    choice = list(choice)
    if program.weights.batch > TIE_BREAK * max(program.weights.accuracy, 1.0):
        return tuple(choice)
    ladders = [
        _larger(stage.options, option) if stage.name in movable else []
        for stage, option in zip(program.stages, choice, strict=True)
    ]
    while any(ladders):
        # The smallest batch first, so that the stages grow together.
        k = min((k for k, ladder in enumerate(ladders) if ladder), key=lambda k: (choice[k].batch_size, k))
        larger = ladders[k].pop(0)
        trial = [*choice[:k], larger, *choice[k + 1 :]]
        if program.latency_seconds(trial) <= SHARE_OF_SLO * program.slo_seconds:
            choice = trial
        else:
            ladders[k] = []
    return tuple(choice)


def _larger(options: tuple[Option, ...], option: Option) -> list[Option]:
    """The same model and replicas with larger batches that carry more, smallest first."""
    found = [
        other
        for other in options
        if other.model == option.model
        and other.batch_size > option.batch_size
        and other.throughput_rps > option.throughput_rps
    ]
    return sorted(
        (replace(other, penalty=option.penalty) for other in found if other.replicas == option.replicas),
        key=lambda other: other.batch_size,
    )
