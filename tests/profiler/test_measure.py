"""Measurements of consecutive full batches with an injected clock, and the latency law fitted to them."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab_profiler.fit import fit_latency
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


@pytest.mark.parametrize(("seconds", "expected_batches"), [(0.001, 100), (0.05, 5), (0.25, 4), (3.0, 1)])
async def test_effort_is_bounded_by_batches_and_time(seconds: float, expected_batches: int) -> None:
    fake, samples = FakeReplica([seconds]), Samples(batch_size=1)
    await measure_round(fake.serve, batches(1), samples, Effort(0.0995, 5, 0.9, rounds=1), fake.clock)

    assert samples.measurement().batches == expected_batches


SIZES = (1, 2, 4, 8, 16, 32, 64)


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 1e-4), st.floats(0, 1e-2), st.floats(1e-4, 1e-1))
def test_fit_recovers_a_law_from_its_values(quadratic: float, linear: float, constant: float) -> None:
    fit = fit_latency(SIZES, [(quadratic * b + linear) * b + constant for b in SIZES])

    assert fit.mean_relative_error < 1e-6
    for size in (1, 3, 24, 64):
        assert fit.seconds(size) == pytest.approx((quadratic * size + linear) * size + constant, rel=1e-5)


def test_small_batches_weigh_as_much_as_large_ones() -> None:
    """Plain least squares would miss batch 1 by far to win a little at batch 64."""
    measured = [0.010, 0.011, 0.013, 0.017, 0.030, 0.070, 0.250]
    fit = fit_latency(SIZES, measured)

    plain = np.polynomial.Polynomial.fit(SIZES, measured, 2).convert()
    plain_error = np.mean([abs(plain(b) / m - 1) for b, m in zip(SIZES, measured, strict=True)])
    assert fit.mean_relative_error < plain_error


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1e-4, 10), min_size=1, max_size=7))
def test_no_fit_is_negative_between_the_measured_sizes(latencies: list[float]) -> None:
    sizes = SIZES[: len(latencies)]
    fit = fit_latency(sizes, latencies)

    assert all(fit.seconds(size) > 0 for size in np.linspace(1, sizes[-1], 100))
    assert np.isfinite(fit.mean_relative_error)


def test_one_and_two_sizes_give_a_constant_and_a_line() -> None:
    assert fit_latency([4], [0.02]).seconds(9) == pytest.approx(0.02)
    assert fit_latency([1, 3], [0.02, 0.04]).seconds(5) == pytest.approx(0.06)


def test_latency_may_fall_with_the_batch() -> None:
    fit = fit_latency([1, 2, 4], [0.030, 0.025, 0.020])

    assert fit.mean_relative_error < 1e-9


@pytest.mark.parametrize(
    ("sizes", "latencies", "message"),
    [
        ([], [], "0 batch sizes and 0 latencies; give one latency for each, at least one"),
        ([1, 2], [0.1], "2 batch sizes and 1 latencies"),
        ([1, 1], [0.1, 0.1], "batch sizes [1, 1] must be distinct and at least 1"),
        ([1, 2], [0.1, 0.0], "latencies [0.1, 0.0] must be above 0 and finite"),
        ([1], [float("nan")], "must be above 0 and finite"),
    ],
)
def test_invalid_points_are_rejected(sizes, latencies, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        fit_latency(sizes, latencies)
