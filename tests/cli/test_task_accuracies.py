"""Accuracies on single tasks: from samples that tell theirs to the pipeline's text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders import a_pipeline, a_stage
from tests.cli.pipelines import TASK_INPUT, a_transformer_pipeline
from tests.model_servers.transformer.test_family import IMAGE, answers, images, spec
from tests.model_servers.transformer.test_family import weights as weights  # noqa: PLC0414  (a fixture)
from trimtab.accuracy.attribution import Choice, ReceivedAnswer, mean_confidences, task_accuracies, task_accuracy_stages
from trimtab.app import run
from trimtab_loadtester.payloads.interface import Score
from trimtab_loadtester.payloads.labelled import LabelledPayloads, SamplesError
from trimtab_model_servers.server.hosted_model import load_model
from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_pipelines.documents import dump_yaml, load_pipeline
from trimtab_pipelines.yaml_edit import with_accuracies

HERE = "tests.cli.test_task_accuracies"
DIGEST = f"sha256:{64 * 'a'}"
BEST: Choice = (("small", "default"),)


def heard(task: str, right: int, of: int, confidence: float) -> list[ReceivedAnswer]:
    return [ReceivedAnswer(Score(int(n < right), 1), {"only": str(confidence)}, task) for n in range(of)]


def test_task_accuracies_include_mean_confidence() -> None:
    pipeline = a_pipeline([a_stage("only")])
    samples = [*heard("cats", 9, 10, 0.8), *heard("dogs", 0, 5, 0.4)]
    found = task_accuracies(pipeline, {BEST: samples}, ("cats", "dogs"), DIGEST)["only", "small", "default"]

    assert {task: (one.value, one.samples, one.mean_confidence) for task, one in found.items()} == {
        "cats": (0.9, 10, 0.8),
        "dogs": (0.0, 5, 0.4),
    }
    assert found["cats"].samples_digest == DIGEST
    assert mean_confidences(samples, task_accuracy_stages(pipeline)) == {}
    assert mean_confidences(samples[:10], task_accuracy_stages(pipeline)) == {"only": 0.8}


def test_only_stages_with_task_input_get_task_accuracies() -> None:
    inputs = [{"name": "y", "from": "first.outputs.y"}, {"name": "task", "from": "request.inputs.task"}]
    pipeline = a_pipeline(
        [a_stage("first"), a_stage("second", inputs=inputs)],
        inputs=[
            {"name": "x", "datatype": "FP32", "shape": [4]},
            {"name": "task", "datatype": "INT64", "shape": []},
        ],
    )
    choice = (("small", "default"), ("small", "default"))
    samples = [*heard("cats", 64, 100, 0.8), *heard("dogs", 0, 100, 0.8)]
    found = task_accuracies(pipeline, {choice: samples}, ("cats", "dogs"), DIGEST)

    assert {place: list(tasks) for place, tasks in found.items()} == {("second", "small", "default"): ["cats"]}
    assert found["second", "small", "default"]["cats"].value == 0.8, "its share of the product"


class Named:
    names: tuple[str, ...] = ("cats", "dogs")

    def __len__(self) -> int:
        return 70

    def __getitem__(self, index: int) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"x": np.zeros(4, np.float32)}, {"y": [0.0] * 4}

    def task(self, index: int) -> str:
        return self.names[index % len(self.names)]


class Odd(Named):
    names = ("Cats",)


class Many(Named):
    names = tuple(f"t{n}" for n in range(70))


class Some(Named):
    names = ("cats", "")


def test_invalid_task_name_is_rejected_before_measuring() -> None:
    def tasks(name: str) -> tuple[str, ...]:
        return LabelledPayloads(a_pipeline(), f"{HERE}:{name}").tasks(70)

    assert sorted(tasks("Named")) == ["cats", "dogs"]
    assert tasks("Some") == ()
    with pytest.raises(SamplesError, match="invalid task 'Cats'"):
        tasks("Odd")
    with pytest.raises(SamplesError, match="of 70 tasks; accuracies are reported of at most 64"):
        tasks("Many")


TEXT = """\
spec:
  stages:
  - name: classify
    variants:
    - name: plain
      accuracy: 0.5  # a guess
      # a comment that stays
    - name: vit
      accuracy: 0.6
      operatingPoints:
      - name: block
        accuracy: 0.6
        accuracyEvidence: {source: Declared}  # not measured
        accuracyByTask:
          cats: {value: 0.1}  # of before
          birds:
            value: 0.2
      - {name: flow, accuracy: 0.6, accuracyByTask: {cats: {value: 0.1}}}
      - {name: new, accuracy: 0.6}
      - {name: empty, accuracy: 0.6, accuracyByTask: {}}
"""


def measured(value: float) -> Accuracy:
    return Accuracy(value=value, source="Measured", samples=9, low=value, high=value, mean_confidence=value)


def test_task_accuracies_replace_only_their_own() -> None:
    places = [("classify", "plain", "default")]
    places += [("classify", "vit", point) for point in ("block", "flow", "new", "empty")]
    on = {"cats": measured(0.75), "on": measured(0.25)}
    written = with_accuracies(TEXT, {place: measured(0.5) for place in places}, dict.fromkeys(places, on))

    def interval(value: str) -> str:
        return f"source: Measured, samples: 9, low: {value}, high: {value}, meanConfidence: {value}}}"

    cats, other = f"cats: {{value: 0.75, {interval('0.75')}", f"'on': {{value: 0.25, {interval('0.25')}"
    evidence = f"accuracyEvidence: {{{interval('0.5')}"
    expected = TEXT.replace("accuracy: 0.6", "accuracy: 0.5").replace(
        "accuracy: 0.5  # a guess",
        f"accuracy: 0.5  # a guess\n      {evidence}\n      accuracyByTask:\n        {cats}\n        {other}",
    )
    expected = expected.replace("vit\n      accuracy: 0.5", f"vit\n      accuracy: 0.5\n      {evidence}")
    expected = expected.replace("accuracyEvidence: {source: Declared}", evidence)
    expected = expected.replace("cats: {value: 0.1}  # of before", f"{cats}  # of before")
    expected = expected.replace("            value: 0.2", f"            value: 0.2\n          {other}")
    expected = expected.replace(
        "flow, accuracy: 0.5, accuracyByTask: {cats: {value: 0.1}}",
        f"flow, accuracy: 0.5, {evidence}, accuracyByTask: {{{cats}, {other}}}",
    )
    expected = expected.replace(
        "new, accuracy: 0.5", f"new, accuracy: 0.5, {evidence}, accuracyByTask: {{{cats}, {other}}}"
    )
    expected = expected.replace(
        "empty, accuracy: 0.5, accuracyByTask: {}",
        f"empty, accuracy: 0.5, {evidence}, accuracyByTask: {{{cats}, {other}}}",
    )
    assert written == expected
    assert with_accuracies(written, {place: measured(0.5) for place in places}, dict.fromkeys(places, on)) == written


PICTURES, ROWS = images(60), 60


class TwoTasks:
    """Images of a transformer's two tasks, labelled with its answers; half the labels of the second are wrong."""

    labels: list[int]

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[dict[str, Any], dict[str, int]]:
        return {"image": PICTURES[index], "task": np.int64(index % 2)}, {"label": self.labels[index]}

    def task(self, index: int) -> str:
        return ("one", "two")[index % 2]


@pytest.mark.parametrize("command", ["evaluate", "tune"])
def test_transformer_is_evaluated_on_each_of_its_tasks(
    command: str, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pipeline.yaml").write_text(
        dump_yaml(a_transformer_pipeline([IMAGE, TASK_INPUT], storageUri=str(weights)))
    )
    given_answers = answers(load_model(spec(weights)), "full", PICTURES, [n % 2 for n in range(ROWS)])
    wrong = [n % 4 == 3 for n in range(ROWS)]
    monkeypatch.setattr(
        TwoTasks, "labels", [int(a) + w for a, w in zip(given_answers["label"], wrong, strict=True)], False
    )

    options = ["--seconds", "0"] if command == "tune" else []
    assert run([command, str(tmp_path), "--samples", f"{HERE}:TwoTasks", *options]) == 0

    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    (point,) = load_pipeline(tmp_path).spec.stages[0].variants[0].points
    one, two = point.accuracy_by_task["one"], point.accuracy_by_task["two"]
    confidence = given_answers["confidence"].numpy()
    assert (one.value, two.value, point.accuracy) == (1.0, 0.5, 0.75)
    assert (one.mean_confidence, two.mean_confidence) == pytest.approx(
        (confidence[::2].mean(), confidence[1::2].mean()), abs=1e-4
    )
    assert (one.samples, one.samples_digest) == (ROWS // 2, point.measured_accuracy().samples_digest)
    assert point.measured_accuracy().mean_confidence is None
    if command == "evaluate":
        assert figures["accuracy_classify_vit_default_two"] == 0.5
