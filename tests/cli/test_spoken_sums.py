"""spoken-sums served by `trimtab up`: WAV files in, transcripts and results out."""

from itertools import pairwise
from pathlib import Path

import pytest
import tritonclient.http

from tests.cli.test_hugging_face import audio_input
from tests.local_run import up
from trimtab_pipelines.documents import load_pipeline
from trimtab_training.spoken_sums.dataset import SumSource

pytestmark = pytest.mark.timeout(300)
FOLDER = Path(__file__).parents[2] / "pipelines" / "spoken-sums"
SUMS = 40
MIN_RIGHT_SHARE = 0.7
MAX_WEIGHT_BYTES = 8_000_000


def test_spoken_sums_are_answered_over_rest(tmp_path: Path) -> None:
    source = SumSource("held-out", seed=91)
    spoken = [source.spoken(index) for index in range(SUMS)]

    with up(tmp_path, pipeline=FOLDER) as serving:
        client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{serving.rest_port}")
        inputs = [audio_input([each.wav()]) for each in spoken]
        answers = [client.infer("spoken-sums", [each], timeout=30_000_000) for each in inputs]

    texts = [answer.as_numpy("text").item().decode() for answer in answers]
    labels = [int(answer.as_numpy("label").item()) for answer in answers]
    right = [each.result == label for each, label in zip(spoken, labels, strict=True)]
    assert sum(each.text == text for each, text in zip(spoken, texts, strict=True)) >= MIN_RIGHT_SHARE * SUMS
    assert sum(right) >= MIN_RIGHT_SHARE * SUMS
    assert all(0 < float(answer.as_numpy("score").item()) <= 1 for answer in answers)


def test_measured_accuracies_rise_with_size() -> None:
    for stage in load_pipeline(FOLDER).spec.stages:
        bounds = [variant.points[0].measured_accuracy() for variant in stage.variants]
        assert all((light.high or 1) < (heavy.low or 0) for light, heavy in pairwise(bounds)), stage.name
        assert any(variant.escalations for variant in stage.variants)


def test_weights_are_small_enough_to_commit() -> None:
    assert sum(file.stat().st_size for file in FOLDER.rglob("*.safetensors")) <= MAX_WEIGHT_BYTES
