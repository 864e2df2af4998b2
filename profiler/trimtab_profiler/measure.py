"""Measurement of a saturated replica: full batches, sent back to back, each timed.

A latency is the round trip that the router sees. Batch sizes are measured in rounds, so that other load on the machine
affects all sizes alike.
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
    """Measurement time of one batch size over all rounds.

    It ends after `seconds` and `min_batches`, whichever is later, but a round starts no batch but its first after its
    share of `max_seconds`.
    """

    seconds: float
    min_batches: int
    max_seconds: float
    rounds: int = 3

    def is_enough(self, batches: int, elapsed_seconds: float) -> bool:
        """Whether a round ends; never before its first batch."""
        if not batches or elapsed_seconds * self.rounds < self.seconds:
            return False
        return batches * self.rounds >= self.min_batches or elapsed_seconds * self.rounds >= self.max_seconds


QUICK = Effort(seconds=0.25, min_batches=6, max_seconds=1.0)
FULL = Effort(seconds=2.0, min_batches=30, max_seconds=10.0)


@dataclass(slots=True)
class Samples:
    """Latencies of full batches of one size, sent back to back during `elapsed_seconds`."""

    batch_size: int
    latencies_seconds: list[float] = field(default_factory=list)
    elapsed_seconds: float = 0.0

    def measurement(self) -> Measurement:
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
    """Serve batches in turn for one round, and add their latencies; the first batch of a size is a warm-up."""
    if not samples.latencies_seconds:
        await serve(batches[0])
    started, served = clock(), 0
    while not effort.is_enough(served, clock() - started):
        sent = clock()
        await serve(batches[len(samples.latencies_seconds) % len(batches)])
        samples.latencies_seconds.append(clock() - sent)
        served += 1
    samples.elapsed_seconds += clock() - started
