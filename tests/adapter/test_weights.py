"""Weights trained in the cluster: used while they are there and good, and each pipeline's own choice of forecaster."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from trimtab_adapter.forecasting import CurrentForecaster, TrainedWeights
from trimtab_pipelines.spec import Adaptation
from trimtab_predictor.lstm import SHIPPED_WEIGHTS, LstmWeights

HISTORY = [20.0, 24.0, 18.0, 30.0] * 60
NOW = 1_700_000_000.0


def put(folder: Path, content: bytes, at: int) -> None:
    path = folder / TrainedWeights.FILE
    path.write_bytes(content)
    os.utime(path, (at, at))


def other_weights() -> bytes:
    weights = LstmWeights.load(SHIPPED_WEIGHTS)
    return LstmWeights(
        weights.kernel, weights.recurrent_kernel, weights.bias, weights.dense_kernel, weights.dense_bias + 1.0
    ).to_bytes()


def test_weights_come_change_and_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights, adaptation = TrainedWeights(tmp_path), Adaptation()
    forecaster = CurrentForecaster(lambda: adaptation, weights)

    def peak() -> float:
        return forecaster.forecast(HISTORY, NOW).peak_rps

    shipped = peak()
    put(tmp_path, other_weights(), 1)
    trained = peak()
    put(tmp_path, b"no weights", 2)
    still = peak()
    (tmp_path / TrainedWeights.FILE).unlink()

    assert trained != shipped
    assert still == trained
    assert "the weights in use stay" in caplog.text
    assert peak() == shipped


def test_what_is_remembered_of_the_load_outlives_the_weights(tmp_path: Path) -> None:
    weights, adaptation = TrainedWeights(tmp_path), Adaptation()
    chance = np.random.default_rng(3)
    hours = chance.poisson(([40.0] * 1740 + [60.0] * 60) * 12)  # what recurs each half hour: ten minutes do not show it
    minutes = chance.poisson([40.0] * 600)

    def peak(*, renewed: bool) -> float:
        forecaster = CurrentForecaster(lambda: adaptation, weights)
        forecaster.forecast(hours, NOW)
        if renewed:
            put(tmp_path, SHIPPED_WEIGHTS.read_bytes(), 1)
        return forecaster.forecast(minutes, NOW + 1735).peak_rps

    assert peak(renewed=True) == peak(renewed=False)


def test_a_folder_that_is_not_there_is_no_fault(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path)
    assert CurrentForecaster(Adaptation, TrainedWeights(tmp_path)).forecast(HISTORY, NOW).source == "lstm"
    assert CurrentForecaster(Adaptation, TrainedWeights(None)).forecast(HISTORY, NOW).source == "lstm"


def test_a_pipeline_may_ask_for_another_forecaster_at_any_time() -> None:
    asked = Adaptation()
    forecaster = CurrentForecaster(lambda: asked, TrainedWeights(None))

    assert forecaster.forecast(HISTORY, NOW).source == "lstm"
    asked = Adaptation(forecaster="Reactive")
    assert forecaster.forecast(HISTORY, NOW).source == "reactive"
