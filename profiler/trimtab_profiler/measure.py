"""Drives a replica at saturation with full batches, one after the other as the router sends them, and times each.

The time is the round trip as the router sees it: what a batch waits for between its departure and its rows.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trimtab_pipelines.profile import Measurement
from trimtab_protocol import Tensor

Batch = tuple[Tensor, ...]
Serve = Callable[[Batch], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Effort:
    """How long one batch size is measured.

    It ends after `seconds` and `least_batches`, whichever is later, but starts no batch after `most_seconds`.
    """

    seconds: float
    least_batches: int
    most_seconds: float

    def enough(self, batches: int, elapsed_seconds: float) -> bool:
        """Whether to stop after so many batches in so many seconds; never before the first."""
        if not batches or elapsed_seconds < self.seconds:
            return False
        return batches >= self.least_batches or elapsed_seconds >= self.most_seconds


QUICK = Effort(seconds=0.25, least_batches=5, most_seconds=1.0)
FULL = Effort(seconds=2.0, least_batches=30, most_seconds=10.0)


async def measure(
    serve: Serve,
    batches: Sequence[Batch],
    batch_size: int,
    effort: Effort,
    clock: Callable[[], float] = time.perf_counter,
) -> Measurement:
    """Serve batches in turn until the effort is spent; the first one, which pays for caches, does not count."""
    await serve(batches[0])
    latencies: list[float] = []
    started = clock()
    while not effort.enough(len(latencies), clock() - started):
        sent = clock()
        await serve(batches[len(latencies) % len(batches)])
        latencies.append(clock() - sent)
    return summarise(latencies, batch_size, clock() - started)


def summarise(latencies_seconds: Sequence[float], batch_size: int, elapsed_seconds: float) -> Measurement:
    """Turn the latencies of full batches, sent back to back over `elapsed_seconds`, into a measurement."""
    p50, p99 = np.quantile(latencies_seconds, (0.5, 0.99))
    return Measurement(
        batch_size=batch_size,
        latency_seconds_mean=float(np.mean(latencies_seconds)),
        latency_seconds_p50=float(p50),
        latency_seconds_p99=float(p99),
        throughput_rps=batch_size * len(latencies_seconds) / elapsed_seconds,
        batches=len(latencies_seconds),
    )
