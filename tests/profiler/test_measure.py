"""Measurements: consecutive full batches for a bounded time, with an injected clock."""

import numpy as np
import pytest

from trimtab_profiler.measure import Effort, Samples, measure_round
from trimtab_protocol import Tensor


class FakeReplica:
    """Takes the scripted seconds for each batch, on a clock of its own."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = seconds
        self.now = 100.0
        self.served: list[int] = []

    async def serve(self, batch: tuple[Tensor, ...]) -> None:
        self.now += self._seconds[min(len(self.served), len(self._seconds) - 1)]
        self.served.append(int(batch[0].array[0]))

    def clock(self) -> float:
        return self.now


def batches(count: int) -> list[tuple[Tensor, ...]]:
    return [(Tensor.of("x", np.array([n, 0, 0, 0])),) for n in range(count)]


async def test_first_batch_is_a_warm_up() -> None:
    fake, samples = FakeReplica([5.0, 0.010, 0.020, 0.030, 0.040]), Samples(batch_size=4)
    await measure_round(fake.serve, batches(2), samples, Effort(0.1, 4, 1.0, rounds=1), fake.clock)

    result = samples.measurement()
    assert fake.served == [0, 0, 1, 0, 1]
    assert result.batches == 4
    assert result.latency_seconds_mean == pytest.approx(0.025)
    assert result.latency_seconds_p50 == pytest.approx(0.025)
    assert result.latency_seconds_p99 == pytest.approx(0.0397)
    assert result.throughput_rps == pytest.approx(4 * 4 / 0.1)


async def test_later_rounds_add_samples_without_warm_up() -> None:
    fake, samples = FakeReplica([5.0, 0.010]), Samples(batch_size=2)
    for _ in range(3):
        await measure_round(fake.serve, batches(4), samples, Effort(0.0595, 6, 1.0, rounds=3), fake.clock)

    assert fake.served == [0, 0, 1, 2, 3, 0, 1]
    assert samples.elapsed_seconds == pytest.approx(0.06)
    assert samples.measurement().throughput_rps == pytest.approx(200)


@pytest.mark.parametrize(
    ("seconds", "expected_batches"),
    [(0.001, 100), (0.05, 5), (0.25, 4), (3.0, 1)],
)
async def test_effort_is_bounded_by_batches_and_time(seconds: float, expected_batches: int) -> None:
    fake, samples = FakeReplica([seconds]), Samples(batch_size=1)
    await measure_round(fake.serve, batches(1), samples, Effort(0.0995, 5, 0.9, rounds=1), fake.clock)

    assert samples.measurement().batches == expected_batches
