"""LSTM forecaster: equality with the trained network, scale invariance, and accuracy of the shipped weights."""

import math
import os
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from trimtab_predictor.context import MEMORY_SECONDS, Context
from trimtab_predictor.features import FEATURES, WindowFeatures, window_features
from trimtab_predictor.lstm import (
    QUANTILES,
    UNITS,
    LstmForecaster,
    LstmWeights,
    WeightsError,
    evaluate_network,
    forecast_peaks,
    forecast_quantiles,
)
from trimtab_predictor.trace import read_trace
from trimtab_predictor.train import (
    MAX_HELD_BACK_SECONDS,
    SCORED_DIVISORS,
    build_network,
    extract_weights,
    forecast_errors,
)
from trimtab_predictor.windows import cut_windows, hold_back, scaled_load, synthetic_load, thicken, thin

DATA = os.environ.get("TRIMTAB_DATA", "")
AR_ERROR = 0.08071
"""SMAPE of AR(12) on the same days: least squares from the peaks of twelve 10 s bins."""


def noisy(rates: NDArray[np.float64], seed: int = 1) -> NDArray[np.float64]:
    return np.random.default_rng(seed).poisson(rates).astype(np.float64)


def plateaus(seconds: int, low: float, high: float, seed: int = 1) -> NDArray[np.float64]:
    """Draw levels held for 2 to 5 minutes, with Poisson arrivals."""
    rng = np.random.default_rng(seed)
    pieces = [np.full(rng.integers(120, 300), rng.uniform(low, high)) for _ in range(seconds // 120 + 1)]
    return noisy(np.concatenate(pieces)[:seconds], seed)


def alone(windows_rps: NDArray[np.float64]) -> Context:
    """The context of windows before which nothing is known."""
    means, deviations = windows_rps.mean(axis=1, keepdims=True), windows_rps.std(axis=1, keepdims=True)
    known = np.full(len(windows_rps), 120 / 1800)
    return Context(np.zeros((len(windows_rps), 4)), np.tile(means, 2), np.tile(deviations, 2), known)


def described(windows_rps: NDArray[np.float64]) -> WindowFeatures:
    return window_features(windows_rps, alone(windows_rps))


def test_numpy_network_matches_keras() -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorFlow's own, on import
        network = build_network(steps=1)
        inputs = described(noisy(np.full((64, 120), 20.0))).inputs
        fresh = extract_weights(network)
        expected_fresh = network(inputs.astype(np.float32)).numpy()
        shipped = LstmWeights.load()
        network.set_weights(
            [shipped.kernel, shipped.recurrent_kernel, shipped.bias, shipped.dense_kernel, shipped.dense_bias]
        )
        expected_shipped = network(inputs.astype(np.float32)).numpy()

    np.testing.assert_allclose(evaluate_network(fresh, inputs), expected_fresh, atol=1e-5)
    np.testing.assert_allclose(evaluate_network(shipped, inputs), expected_shipped, atol=1e-5)


def test_windows_are_normalized_by_their_deviation() -> None:
    window = np.tile([1.0, 3.0], 60)

    seen = described(window[None])

    assert seen.inputs.shape == (1, 12, FEATURES)
    assert seen.means == pytest.approx([2.0])
    assert seen.spreads == pytest.approx([0.5])
    assert seen.peaks == pytest.approx([1.0])
    # Mean 2, deviation 1. Maximum 3, mean 2, mean + deviation 3; newer half 3 1 3 1 3: maximum 3, mean 2.2.
    # The deviation is half the mean; its square half of what independent arrivals would have; 2 of 30 minutes known.
    sizes = [np.log(0.5) / 3 + 0.5, np.log(0.5) / 2, 2 / 30]
    np.testing.assert_allclose(seen.inputs[0, 0], [1.0, 0.0, 1.0, 1.0, 0.2, *sizes, *[0.0] * 8], atol=1e-12)


def test_context_is_normalized_by_the_window() -> None:
    context = Context(np.array([[0.2, 0.0, -0.5, 1.0]]), np.array([[4.0, 2.0]]), np.array([[2.0, 0.0]]), np.ones(1))

    seen = window_features(np.tile([1.0, 3.0], 60)[None], context)

    # The peak is 3: after (1 + 0.2) / (1 - 0.2) times as much it is 4.5, 1.5 deviations more; after 0.5 / 1.5, 1.
    # Doubling without end is shown as 8. Usual are 2 deviations above the mean, and the mean; twice the spread, none.
    expected = [1.5, 0.0, -2.0, 8.0, 2.0, 0.0, np.log(2.0), np.log(0.05)]
    np.testing.assert_allclose(seen.inputs[0, :, 8:], np.tile(expected, (12, 1)))


def test_noise_free_window_hides_the_context() -> None:
    context = Context(np.ones((1, 4)), np.full((1, 2), 9.0), np.full((1, 2), 3.0), np.ones(1))

    assert not window_features(np.full((1, 120), 5.0), context).inputs[..., 8:].any()


@pytest.mark.parametrize(("before", "rps"), [(0.0, 0.0), (0.1, 0.1), (10.0, 10.0), (1e6, 1e6), (10.0, 30.0)])
def test_load_without_noise_is_repeated(before: float, rps: float) -> None:
    """A jump is repeated once it has lasted for 20 seconds."""
    windows = np.concatenate([np.full((1, 100), before), np.full((1, 20), rps)], axis=1)

    forecasts = forecast_quantiles(LstmWeights.load(), windows, alone(windows))
    np.testing.assert_allclose(forecasts, [[rps] * len(QUANTILES)], rtol=1e-9)


@pytest.mark.parametrize("times", [0.5, 3.0, 10.0])
def test_forecast_scales_with_the_load(times: float) -> None:
    """Size shows only in how the noise compares to that of independent arrivals."""
    weights = LstmWeights.load()
    load = noisy(np.full(9000, 12.0))
    small, large = (cut_windows(rps, 100) for rps in (load, load * times))

    np.testing.assert_allclose(
        forecast_peaks(weights, large.histories_rps, large.context),
        forecast_peaks(weights, small.histories_rps, small.context) * times,
        rtol=0.3,
    )


def test_forecast_takes_at_most_five_milliseconds() -> None:
    forecaster = LstmForecaster(LstmWeights.load())
    history = noisy(np.full(MEMORY_SECONDS, 30.0))
    took = []
    for _ in range(50):
        started = time.thread_time()
        forecaster.forecast(history, 0.0)
        took.append(time.thread_time() - started)

    assert float(np.median(took)) <= 0.005


LOADS = {
    **{f"level, {rps} rps": (noisy(np.full(20_000, float(rps))), 20) for rps in (5, 20, 60, 1000)},
    **{f"bursts of {size}": (size * noisy(np.full(20_000, 12.0)), 20) for size in (5, 50, 5000)},
    **{f"plateaus, {low} to {high} rps": (plateaus(40_000, low, high), 10) for low, high in ((4, 40), (20, 200))},
}


@pytest.mark.parametrize(("load", "stride_seconds"), LOADS.values(), ids=LOADS)
def test_shipped_weights_beat_reactive(load: NDArray[np.float64], stride_seconds: int) -> None:
    """Bursts are noise, not a change."""
    ours, reactive = forecast_errors(LstmWeights.load(), cut_windows(load, stride_seconds))

    assert ours < reactive


@pytest.mark.skipif(not DATA, reason="TRIMTAB_DATA names no folder with twitter_rps_train.csv.gz")
def test_shipped_weights_meet_their_bars_on_test_days() -> None:
    _, held_back = hold_back(read_trace(Path(DATA) / "twitter_rps_train.csv.gz").rps, MAX_HELD_BACK_SECONDS)

    windows = [cut_windows(scaled_load(held_back, divisor), 10) for divisor in SCORED_DIVISORS]
    errors = [forecast_errors(LstmWeights.load(), cut) for cut in windows]

    assert errors[0][0] <= 0.83 * AR_ERROR
    assert all(lstm < reactive for lstm, reactive in errors)


def test_weights_round_trip(tmp_path: Path) -> None:
    shipped = LstmWeights.load()
    path = tmp_path / "lstm.npz"
    path.write_bytes(shipped.to_bytes())

    assert LstmWeights.load(path).to_bytes() == shipped.to_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": np.zeros(7)}, r"bias must be \(192,\) finite numbers, is \(7,\)"),
        ({"dense_bias": np.full(3, math.nan)}, r"dense_bias must be \(3,\) finite numbers"),
        ({"kernel": None}, "cannot be read .*kernel is not a file in the archive"),
        ({"kernel": np.array([{"a": 1}], dtype=object)}, "cannot be read .*Object arrays cannot be loaded"),
    ],
)
def test_foreign_weights_are_rejected(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    arrays = {
        "kernel": np.zeros((FEATURES, 4 * UNITS)),
        "recurrent_kernel": np.zeros((UNITS, 4 * UNITS)),
        "bias": np.zeros(4 * UNITS),
        "dense_kernel": np.zeros((UNITS, len(QUANTILES))),
        "dense_bias": np.zeros(len(QUANTILES)),
    }
    path = tmp_path / "lstm.npz"
    np.savez(path, **{name: array for name, array in (arrays | changes).items() if array is not None})  # type: ignore[arg-type]

    with pytest.raises(WeightsError, match=message):
        LstmWeights.load(path)


def test_windows_with_gaps_are_excluded() -> None:
    load = np.arange(300.0)
    load[150] = np.nan

    cut = cut_windows(load, 5)

    assert not np.isnan(cut.histories_rps).any()
    assert cut.peaks_rps.tolist() == [139.0, 144.0, 149.0, 294.0, 299.0]
    assert cut.histories_rps[3, 0] == 155.0
    assert len(cut_windows(load[:139], 5)) == 0


def test_thinning_and_thickening_keep_gaps_and_scale_the_mean() -> None:
    rng = np.random.default_rng(3)
    load = noisy(np.full(50_000, 60.0))
    load[1000:1100] = np.nan

    thinned, thick = thin(load, 12, rng), thicken(load, 4, rng)

    assert np.isnan(thinned[1000:1100]).all()
    assert np.isnan(thick[1000:1100]).all()
    assert np.nanmean(thinned) == pytest.approx(5.0, rel=0.02)
    assert np.nanvar(thinned) == pytest.approx(5.0, rel=0.05)
    assert np.nanmean(thick) == pytest.approx(240.0, rel=0.02)
    assert synthetic_load(1234, rng).shape == (1234,)
