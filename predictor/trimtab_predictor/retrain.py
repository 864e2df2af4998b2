"""Retraining of the LSTM on the cluster's own load; the result is used only if it is proven better.

    python -m trimtab_predictor.retrain --prometheus URL --weights-config-map NAME --namespace NAMESPACE

The load of every pipeline is read from Prometheus; its newest quarter is held back. Training continues from the weights
in use (those in the ConfigMap, else the shipped ones), on the older part. New weights replace the old ones only if
their error is lower on the held-back part and no higher on synthetic loads; otherwise nothing is written. An
interrupted run leaves the old weights.
"""

import argparse
import asyncio
import base64
import binascii
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab_kubernetes import Cluster, ClusterError
from trimtab_kubernetes.objects import rfc3339
from trimtab_pipelines.documents import DocumentError
from trimtab_pipelines.result_line import ResultLine, threshold
from trimtab_predictor.forecaster import smape
from trimtab_predictor.load_history import ObservationError
from trimtab_predictor.lstm import LstmWeights, WeightsError, forecast_peaks
from trimtab_predictor.prometheus_history import read_histories
from trimtab_predictor.trace import TraceError
from trimtab_predictor.train import fine_tune
from trimtab_predictor.windows import Windows, cut_windows, hold_back, synthetic_load

MANAGER = "trimtab-trainer"
WEIGHTS_KEY = "lstm.npz"
STRIDE_SECONDS = 10
SYNTHETIC_SECONDS = 20_000
MIN_GAIN = 0.005
"""Share of the old error that new weights must gain."""
MAX_LOSS_ON_SYNTHETIC = 0.02
EPOCHS = 6


@dataclass(frozen=True, slots=True)
class WeightsComparison:
    """Errors of old and new weights on data neither was trained on."""

    old_error: float
    new_error: float
    old_error_on_synthetic: float
    new_error_on_synthetic: float

    @property
    def is_better(self) -> bool:
        gains = self.new_error <= (1 - MIN_GAIN) * self.old_error
        return gains and self.new_error_on_synthetic <= (1 + MAX_LOSS_ON_SYNTHETIC) * self.old_error_on_synthetic

    @property
    def reason(self) -> str:
        found = f"error {self.new_error:.2%} against {self.old_error:.2%} on held-back load"
        shapes = f"{self.new_error_on_synthetic:.2%} against {self.old_error_on_synthetic:.2%} on synthetic loads"
        return f"{found}, {shapes}: {'replacing the old weights' if self.is_better else 'the old weights stay'}"


def compare_weights(old: LstmWeights, new: LstmWeights, held_back: Sequence[NDArray[np.float64]]) -> WeightsComparison:
    """Compare networks on held-back and synthetic loads; raise TraceError without a held-back window."""
    windows = [cut_windows(load, STRIDE_SECONDS) for load in held_back]
    known = [one for one in windows if len(one)]
    if not known:
        raise TraceError("no two minutes and twenty seconds of held-back load are without a gap; wait for more history")
    shapes = cut_windows(synthetic_load(SYNTHETIC_SECONDS, np.random.default_rng(11)), STRIDE_SECONDS)
    return WeightsComparison(_error(old, known), _error(new, known), _error(old, [shapes]), _error(new, [shapes]))


def _error(weights: LstmWeights, parts: Sequence[Windows]) -> float:
    forecasts = [forecast_peaks(weights, part.histories_rps, part.context) for part in parts]
    return smape(np.concatenate(forecasts), np.concatenate([part.peaks_rps for part in parts]))


async def weights_in_use(cluster: Cluster, namespace: str, name: str) -> LstmWeights:
    """The weights of the ConfigMap if they are valid, else the shipped ones."""
    found = await cluster.get("ConfigMap", namespace, name)
    encoded = (found or {}).get("binaryData", {}).get(WEIGHTS_KEY)
    if encoded is None:
        return LstmWeights.load()
    try:
        return LstmWeights.parse(base64.b64decode(encoded, validate=True), f"ConfigMap {namespace}/{name}")
    except (WeightsError, binascii.Error) as error:
        sys.stderr.write(f"trimtab_predictor: {error}; continuing from the shipped weights\n")
        return LstmWeights.load()


def config_map(
    namespace: str, name: str, weights: LstmWeights, verdict: WeightsComparison, at_seconds: float
) -> dict[str, Any]:
    errors = {"smape": round(verdict.new_error, 5), "smape_of_the_weights_before": round(verdict.old_error, 5)}
    labels = {"app.kubernetes.io/part-of": "trimtab", "app.kubernetes.io/component": "forecaster"}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "binaryData": {WEIGHTS_KEY: base64.b64encode(weights.to_bytes()).decode()},
        "data": {"forecast_accuracy.json": json.dumps({"trained_at": rfc3339(at_seconds)} | errors)},
    }


async def retrain(cluster: Cluster, loads: list[NDArray[np.float64]], namespace: str, name: str) -> WeightsComparison:
    """Train on loads, compare, and write the weights if they are better; raises TraceError and ClusterError."""
    old = await weights_in_use(cluster, namespace, name)
    parts = [hold_back(load) for load in loads]
    new = await asyncio.to_thread(fine_tune, old, [learned for learned, _ in parts], EPOCHS)
    verdict = compare_weights(old, new, [held_back for _, held_back in parts])
    if verdict.is_better:
        await cluster.apply(config_map(namespace, name, new, verdict, time.time()), manager=MANAGER)
    return verdict


async def run(options: argparse.Namespace) -> ResultLine:
    started = time.monotonic()
    loads = await read_histories(
        options.prometheus, options.hours * 3600.0, options.prometheus_token_file, options.prometheus_ca
    )
    async with await Cluster.connect() as cluster:
        verdict = await retrain(cluster, loads, options.namespace, options.weights_config_map)
    sys.stdout.write(verdict.reason + "\n")
    seconds = time.monotonic() - started
    figures: dict[str, float | int | str | None] = {
        "pipelines": len(loads),
        "old_smape": round(verdict.old_error, 5),
        "new_smape": round(verdict.new_error, 5),
        "weights_replaced": int(verdict.is_better),
        "seconds": round(seconds, 1),
    }
    return ResultLine(name="retrain", figures=figures, bars=(threshold("seconds", round(seconds, 1), "<=", 600.0),))


def main(arguments: Sequence[str] | None = None) -> int:
    """Retrain once; 0 when done, whichever weights are used, 2 if there is no load to train on, 1 on a failure."""
    parser = argparse.ArgumentParser(prog="python -m trimtab_predictor.retrain", description=__doc__)
    parser.add_argument("--prometheus", required=True, help="address of the Prometheus that scrapes the routers")
    parser.add_argument("--prometheus-token-file", type=Path, help="bearer token file, read for each query")
    parser.add_argument("--prometheus-ca", type=Path, help="certificate authority of its address")
    parser.add_argument("--weights-config-map", default="trimtab-forecaster")
    parser.add_argument("--namespace", required=True, help="where the ConfigMap is")
    parser.add_argument("--hours", type=float, default=24 * 14, help="hours of history to read")
    try:
        asyncio.run(run(parser.parse_args(arguments))).print()
    except (TraceError, ObservationError, DocumentError, ClusterError) as error:
        sys.stderr.write(f"trimtab_predictor: {error}\n")
        return 1 if isinstance(error, ClusterError) else 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
