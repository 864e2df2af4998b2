"""Seconds reconstructed from bins: they keep the measured peak and mean, and vary as arrivals do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_predictor.load_history import BIN_SECONDS, seconds_of_bins

BINS = st.lists(
    st.tuples(st.floats(0, 1e6), st.floats(0, 1)).map(lambda pair: (pair[0], pair[0] * max(pair[1], 0.1))), min_size=1
)


@given(BINS)
def test_peak_and_mean_are_kept(bins: list[tuple[float, float]]) -> None:
    rebuilt = seconds_of_bins(bins).reshape(-1, BIN_SECONDS)

    np.testing.assert_allclose(rebuilt.max(axis=1), [peak for peak, _ in bins], rtol=1e-9)
    np.testing.assert_allclose(rebuilt.mean(axis=1), [mean for _, mean in bins], rtol=1e-6, atol=1e-9)
    assert (rebuilt >= 0).all()


def test_seconds_vary_as_arrivals_do() -> None:
    load = np.random.default_rng(1).poisson(50.0, 10_000).astype(np.float64).reshape(-1, BIN_SECONDS)

    rebuilt = seconds_of_bins(zip(load.max(axis=1), load.mean(axis=1), strict=True))

    assert rebuilt.std() == pytest.approx(load.std(), rel=0.1)
