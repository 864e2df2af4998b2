"""Retraining from the history of a real Prometheus into a real API server; worse weights are not written."""

import base64
import shutil
import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.control_plane import prometheus
from trimtab_kubernetes import Cluster
from trimtab_predictor.load_history import ObservationError
from trimtab_predictor.lstm import LstmWeights
from trimtab_predictor.prometheus_history import read_histories
from trimtab_predictor.retrain import WEIGHTS_KEY, WeightsComparison, compare_weights, retrain, weights_in_use
from trimtab_predictor.trace import TraceError
from trimtab_predictor.windows import hold_back

BIN_SECONDS = 10
START_SECONDS = 30.0
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs prometheus and promtool (Debian: apt install prometheus)",
)


def a_load(seconds: int, seed: int = 1, high: float = 60.0) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    levels = np.repeat(rng.uniform(10, high, seconds // 150 + 1), 150)[:seconds]
    return rng.poisson(levels).astype(np.float64)


def openmetrics(load: NDArray[np.float64], end: int) -> str:
    """Write a load as a router would have exposed it every ten seconds."""
    labels = '{namespace="shop",pipeline="digits",pod="router-1"}'
    bins = load.reshape(-1, BIN_SECONDS)
    times = [end - BIN_SECONDS * (len(bins) - 1 - n) for n in range(len(bins))]
    lines = ["# TYPE trimtab_arrivals_peak_rps gauge"]
    lines += [f"trimtab_arrivals_peak_rps{labels} {bins[n].max()} {at}" for n, at in enumerate(times)]
    lines += ["# TYPE trimtab_requests_received counter"]
    received = np.cumsum(bins.sum(axis=1))
    lines += [f"trimtab_requests_received_total{labels} {received[n]} {at}" for n, at in enumerate(times)]
    return "\n".join([*lines, "# EOF", ""])


@contextmanager
def prometheus_with(folder: Path, text: str) -> Iterator[str]:
    """Start a real Prometheus that has kept this."""
    source, data = folder / "history.txt", folder / "data"
    source.write_text(text)
    subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", source, data], check=True, capture_output=True
    )
    (folder / "prometheus.yml").write_text("global: {}\n")
    with prometheus(folder) as (url, process):
        _ready(url, process)
        yield url


def _ready(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_SECONDS
    with httpx.Client() as client:
        while time.monotonic() < until and process.poll() is None:
            try:
                if client.get(f"{url}/-/ready").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.05)
    pytest.fail("Prometheus did not start")


@needs_prometheus
async def test_history_round_trips_through_prometheus(tmp_path: Path):
    load = a_load(3 * 3600)
    end = int(time.time()) // BIN_SECONDS * BIN_SECONDS - 60

    with prometheus_with(tmp_path, openmetrics(load, end)) as url:
        (found,) = await read_histories(url, 4 * 3600.0)

    peaks = load.reshape(-1, BIN_SECONDS).max(axis=1)
    read = found.reshape(-1, BIN_SECONDS)
    known = ~np.isnan(read).any(axis=1)
    assert known.sum() > 0.95 * len(peaks)
    # Prometheus carries a sample up to one step on: each bin's peak is the one of its moment or of the one before.
    shown = read[known].max(axis=1)
    assert np.isin(shown, peaks).all()
    assert np.nanmean(found) == pytest.approx(load.mean(), rel=0.1)


@needs_prometheus
async def test_history_of_many_pipelines_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trimtab_predictor.prometheus_history.MAX_PIPELINE_SECONDS", 3600)
    end = int(time.time()) // BIN_SECONDS * BIN_SECONDS - 60

    with prometheus_with(tmp_path, openmetrics(a_load(3 * 3600), end)) as url:
        (found,) = await read_histories(url, 4 * 3600.0)

    assert 2400 <= found.size <= 3600


@needs_prometheus
async def test_prometheus_without_load_is_reported(tmp_path: Path):
    with (
        prometheus_with(tmp_path, "# TYPE other gauge\nother 1 1\n# EOF\n") as url,
        pytest.raises(ObservationError, match="has no trimtab_arrivals_peak_rps of the last 2 hours"),
    ):
        await read_histories(url, 7200.0)


async def test_unreachable_prometheus_is_reported():
    with pytest.raises(ObservationError, match=r"http://127.0.0.1:9/.* cannot be reached"):
        await read_histories("http://127.0.0.1:9", 3600.0)


def worse(weights: LstmWeights) -> LstmWeights:
    """The same network, saying twelve deviations too much."""
    return replace(weights, dense_bias=weights.dense_bias + 12.0)


@pytest.mark.parametrize("old_is_better", [True, False])
def test_better_weights_win_on_unseen_load(*, old_is_better: bool):
    shipped = LstmWeights.load()
    old, new = (shipped, worse(shipped)) if old_is_better else (worse(shipped), shipped)

    verdict = compare_weights(old, new, [a_load(4000, seed=9)])

    assert verdict.is_better is not old_is_better
    assert ("the old weights stay" in verdict.reason) is old_is_better


@pytest.mark.parametrize("errors", [(0.10, 0.05, 0.10, 0.20), (0.10, 0.10, 0.10, 0.10)])
def test_worse_on_known_load_or_equal_weights_are_rejected(errors: tuple[float, float, float, float]):
    assert not WeightsComparison(*errors).is_better


def test_incomplete_window_is_not_evaluated():
    shipped = LstmWeights.load()

    with pytest.raises(TraceError, match="wait for more history"):
        compare_weights(shipped, shipped, [np.full(100, 1.0)])


async def write_weights(cluster: Cluster, namespace: str, content: bytes) -> None:
    metadata = {"name": "trimtab-forecaster", "namespace": namespace}
    data = {WEIGHTS_KEY: base64.b64encode(content).decode()}
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "binaryData": data}
    await cluster.apply(body, manager="trimtab-trainer")


async def test_training_replaces_only_bad_weights(cluster: Cluster, namespace: str):
    bad, load = worse(LstmWeights.load()), a_load(3600)
    await write_weights(cluster, namespace, bad.to_bytes())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorFlow's own, on import
        verdict = await retrain(cluster, [load], namespace, "trimtab-forecaster")

    used = await weights_in_use(cluster, namespace, "trimtab-forecaster")
    assert verdict.is_better
    assert used.to_bytes() != bad.to_bytes()
    assert compare_weights(bad, used, [hold_back(load)[1]]).is_better


async def test_damaged_weights_in_the_cluster_are_skipped(cluster: Cluster, namespace: str):
    await write_weights(cluster, namespace, b"not an archive")

    used = await weights_in_use(cluster, namespace, "trimtab-forecaster")

    assert used.to_bytes() == LstmWeights.load().to_bytes()
