"""Drives a replica at saturation with full batches, one after the other as the router sends them, and times each.

The time is the round trip as the router sees it: what a batch waits for between its departure and its rows. Batch
sizes are visited in rounds, so that a moment in which the machine was busy falls on all sizes a little instead of on
one size alone.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from trimtab_pipelines.profile import Measurement
from trimtab_protocol import Tensor

Batch = tuple[Tensor, ...]
Serve = Callable[[Batch], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Effort:
    """How long one batch size is measured, all rounds together.

    It ends after `seconds` and `least_batches`, whichever is later, but no round starts a batch after its share of
    `most_seconds`, except its first.
    """

    seconds: float
    least_batches: int
    most_seconds: float
    rounds: int = 3

    def enough(self, batches: int, elapsed_seconds: float) -> bool:
        """Whether to end a round after so many batches in so many seconds; never before the first."""
        if not batches or elapsed_seconds * self.rounds < self.seconds:
            return False
        return batches * self.rounds >= self.least_batches or elapsed_seconds * self.rounds >= self.most_seconds


QUICK = Effort(seconds=0.25, least_batches=6, most_seconds=1.0)
FULL = Effort(seconds=2.0, least_batches=30, most_seconds=10.0)


@dataclass(slots=True)
class Samples:
    """The latencies of full batches of one size, sent back to back during `elapsed_seconds`."""

    batch_size: int
    latencies_seconds: list[float] = field(default_factory=list)
    elapsed_seconds: float = 0.0

    def measurement(self) -> Measurement:
        """Sum them up."""
        p50, p99 = np.quantile(self.latencies_seconds, (0.5, 0.99))
        count = len(self.latencies_seconds)
        return Measurement(
            batch_size=self.batch_size,
            latency_seconds_mean=float(np.mean(self.latencies_seconds)),
            latency_seconds_p50=float(p50),
            latency_seconds_p99=float(p99),
            throughput_rps=self.batch_size * count / self.elapsed_seconds,
            batches=count,
        )


async def measure_round(
    serve: Serve,
    batches: Sequence[Batch],
    samples: Samples,
    effort: Effort,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Serve batches in turn until a round's effort is spent, and add their latencies to `samples`.

    The very first batch of a size, which pays for caches, is not counted.
    """
    if not samples.latencies_seconds:
        await serve(batches[0])
    started, served = clock(), 0
    while not effort.enough(served, clock() - started):
        sent = clock()
        await serve(batches[len(samples.latencies_seconds) % len(batches)])
        samples.latencies_seconds.append(clock() - sent)
        served += 1
    samples.elapsed_seconds += clock() - started
