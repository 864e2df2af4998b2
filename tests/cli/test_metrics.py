"""Metrics of answers by task: known values, their intervals, and the metric that a pipeline has."""

from typing import Any

import numpy as np
import pytest

from tests.builders import a_pipeline, a_stage, a_variant
from trimtab.accuracy.attribution import ReceivedAnswer
from trimtab.accuracy.metrics import METRIC_ANNOTATION, METRICS, metric_of, tally
from trimtab_loadtester.payloads.interface import Score
from trimtab_pipelines.errors import UserError
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol.tensors import bytes_array

TEXT = {"name": "y", "datatype": "BYTES"}
BOX = [10.0, 10.0, 50.0, 50.0]


def a_reader(family: str = "echo", **annotations: str) -> InferencePipeline:
    stage = a_stage(outputs=[TEXT], variants=[a_variant("small", family=family)])
    return a_pipeline([stage]).with_metadata(annotations=annotations)


def said(truth: str, answer: str) -> ReceivedAnswer:
    return ReceivedAnswer(
        Score(int(truth == answer), 1), truth={"y": truth}, outputs={"y": bytes_array([answer.encode()], (1,))}
    )


@pytest.mark.parametrize(
    ("metric", "right", "wrong", "value"),
    [
        ("f1", ("the red fox", "a red fox!"), ("red fox", "red dog"), 0.75),
        ("exact-match", ("the red fox", "a red fox!"), ("red fox", "red dog"), 0.5),
        ("rouge-l", ("the red fox runs", "the red fox runs"), ("one two", "three four"), 0.5),
        ("word-accuracy", ("Call me, now.", "call me now"), ("seven", "eleven"), 0.75),
        ("word-accuracy", ("", "noise"), ("one two", "one two"), 0.5),
        ("bleu", ("one two three four five", "one two three four five"), ("six", "six"), 1.0),
        ("chrf", ("one two", "one two"), ("three", "three"), 1.0),
        ("accuracy", ("one", "one"), ("two", "three"), 0.5),
    ],
)
def test_metric_of_texts_has_its_known_value(
    metric: str, right: tuple[str, str], wrong: tuple[str, str], value: float
) -> None:
    found = tally(metric, a_reader(), [said(*right), said(*wrong)])
    assert found.share == pytest.approx(value)
    if found.bounds is not None:
        assert found.bounds[0] <= value <= found.bounds[1]


def test_bootstrap_interval_narrows_with_samples() -> None:
    few, many = (tally("word-accuracy", a_reader(), [said("one", "one"), said("one", "two")] * n) for n in (5, 200))
    assert few.bounds is not None
    assert many.bounds is not None
    assert 0.05 < many.bounds[1] - many.bounds[0] < 0.15 < few.bounds[1] - few.bounds[0]


def test_mean_average_precision_is_of_labels_and_boxes() -> None:
    names = {"label": "BYTES", "box": "FP32", "score": "FP32"}
    outputs = [{"name": "n", "datatype": "INT64"}] + [
        {"name": name, "datatype": datatype, "shape": [4] if name == "box" else [], "countedBy": "n"}
        for name, datatype in names.items()
    ]
    stage = a_stage("detect", outputs=outputs, variants=[a_variant("small")])
    read = [{"name": f"all-{name}", "from": f"detect.outputs.{name}"} for name in names]
    pipeline = a_pipeline([stage], outputs=read)

    def seen(label: str, box: Any) -> ReceivedAnswer:
        found = {"label": bytes_array([label.encode()], (1,)), "box": np.array([box], np.float32), "score": np.ones(1)}
        truth = {"all-label": ["cat"], "all-box": [BOX]}
        return ReceivedAnswer(Score(0, 1), truth=truth, outputs={f"all-{name}": array for name, array in found.items()})

    assert tally("map", pipeline, [seen("cat", BOX)] * 4).share == pytest.approx(1.0)
    assert tally("map", pipeline, [seen("dog", BOX)] * 4).share == 0
    with pytest.raises(UserError, match="needs outputs label, box and score"):
        tally("map", a_reader(), [said("cat", "cat")])


def test_metric_follows_from_family_or_annotation() -> None:
    assert metric_of(a_reader()) == "accuracy"
    assert metric_of(a_reader("hf/summarization")) == "rouge-l"
    assert metric_of(a_reader("hf/summarization", **{METRIC_ANNOTATION: "f1"})) == "f1"
    with pytest.raises(UserError, match=f"'wer' is unknown; known: {', '.join(METRICS)}"):
        metric_of(a_reader(**{METRIC_ANNOTATION: "wer"}))
    with pytest.raises(UserError, match="has no text among its outputs"):
        tally("f1", a_reader(), [ReceivedAnswer(Score(1, 1), truth={"y": 3})])
