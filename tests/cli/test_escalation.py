"""Escalations measured on a user's own samples: their thresholds, and the pipeline document written with them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders import a_pipeline_document, a_stage, a_variant
from tests.cli.pipelines import a_transformer_pipeline
from tests.model_servers.transformer.test_family import answers, images, spec
from tests.model_servers.transformer.test_family import weights as weights  # noqa: PLC0414  (a fixture)
from trimtab.accuracy.attribution import Choice, ReceivedAnswer, escalations
from trimtab.app import run
from trimtab_loadtester.payloads.interface import Score
from trimtab_model_servers.server.hosted_model import load_model
from trimtab_pipelines.documents import dump_yaml, load_pipeline
from trimtab_pipelines.escalation import Escalation, TaskEscalation
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.yaml_edit import with_escalations
from trimtab_training.vit_tasks.datasets import TASKS, HeldOut

ROWS = 600
POINTS = [{"name": "full", "accuracy": 0.9}, {"name": "fast", "accuracy": 0.8}]


def a_document(confidence: str | None = "sure", stages: int = 1) -> InferencePipeline:
    outputs = [{"name": "y", "datatype": "FP32"}, {"name": "sure", "datatype": "FP32"}]
    fields: dict[str, Any] = {"outputs": outputs, "variants": [a_variant("one", accuracy=0.9, operatingPoints=POINTS)]}
    if confidence is not None:
        fields["confidence"] = confidence
    named = [a_stage("first", **fields), a_stage("second", "first.outputs.y", **fields)]
    return InferencePipeline.model_validate(a_pipeline_document(named[:stages]))


def heard_of(confidence: np.ndarray, right: np.ndarray, rows: int = 1) -> list[ReceivedAnswer]:
    pairs = zip(confidence.tolist(), right.tolist(), strict=True)
    return [ReceivedAnswer(Score(hit * rows, rows), {"first": ",".join([f"{sure:.4g}"] * rows)}) for sure, hit in pairs]


def both_points(rows: int = 1) -> dict[Choice, list[ReceivedAnswer]]:
    """`fast` is wrong on its least confident rows, where `full` is correct."""
    confidence = np.random.default_rng(0).random(ROWS)
    right = confidence > 0.3
    every = np.ones(ROWS, bool)
    return {
        (("one", "full"),): heard_of(confidence, every, rows),
        (("one", "fast"),): heard_of(confidence, right, rows),
    }


def test_least_confident_rows_are_escalated() -> None:
    found = escalations(a_document(), both_points())

    assert found["first", "one", "full"] == ()
    best = found["first", "one", "fast"][-1]
    assert (best.to, best.samples) == ("full", ROWS)
    assert best.share == pytest.approx(0.3, abs=0.05)
    assert best.accuracy > 0.99


def test_samples_with_tasks_get_thresholds_by_task() -> None:
    answers_by_choice = {
        choice: [replace(one, task=("easy", "hard")[place % 2]) for place, one in enumerate(heard)]
        for choice, heard in both_points().items()
    }
    best = escalations(a_document(), answers_by_choice)["first", "one", "fast"][-1]

    assert set(best.by_task) == {"easy", "hard"}
    assert all(0.25 < one.confidence_below < 0.35 for one in best.by_task.values())
    some = {choice: [replace(heard[0], task=""), *heard[1:]] for choice, heard in answers_by_choice.items()}
    assert not escalations(a_document(), some)["first", "one", "fast"][-1].by_task, "a sample has no task"
    assert {HeldOut().task(row) for row in (0, 1_000, 2_000, 3_079)} == set(TASKS)


def test_task_thresholds_are_written_into_escalations() -> None:
    by_task = {"cars": TaskEscalation(confidence_below=0, share=0, accuracy=0.9)}
    look = Escalation(to="full", confidence_below=0.4, share=0.1, accuracy=0.86, by_task=by_task)
    written = with_escalations(TEXT, {("classify", "vit", "flow"): (look,)})

    task = "cars: {confidenceBelow: 0, share: 0, accuracy: 0.9}"
    line = f"{{to: full, confidenceBelow: 0.4, share: 0.1, accuracy: 0.86, byTask: {{{task}}}}}"
    assert f"{{name: flow, accuracy: 0.8, escalations: [{line}]}}" in written


def test_escalations_need_one_stage_and_single_rows() -> None:
    assert escalations(a_document(confidence=None), both_points()) == {}
    assert escalations(a_document(stages=2), both_points()) == {}
    assert escalations(a_document(), both_points(rows=2)) == {}


TEXT = """\
spec:
  stages:
  - name: classify
    variants:
    - name: vit
      operatingPoints:
      - {name: full, accuracy: 0.9}
      - {name: flow, accuracy: 0.8}
      - name: block
        merging: {schedule: [8]}
        accuracy: 0.8   # a guess
      - name: old
        escalations:
        - {to: full, confidenceBelow: 0.5, share: 0.2, accuracy: 0.85}  # of before
        # a comment that stays
        accuracy: 0.8
      - name: other
        accuracy: 0.7
        escalations: []
"""


def test_yaml_edit_replaces_only_escalations() -> None:
    look = Escalation(to="full", confidence_below=0.4, share=0.1, accuracy=0.86, accuracy_low=0.84, samples=500)
    line = "{to: full, confidenceBelow: 0.4, share: 0.1, accuracy: 0.86, accuracyLow: 0.84, samples: 500}"
    given: dict[tuple[str, str, str], tuple[Escalation, ...]] = {
        ("classify", "vit", name): (look,) for name in ("flow", "block", "old")
    }
    written = with_escalations(TEXT, given | {("classify", "vit", "full"): ()})

    expected = TEXT.replace("{name: flow, accuracy: 0.8}", f"{{name: flow, accuracy: 0.8, escalations: [{line}]}}")
    expected = expected.replace("  # a guess", f"  # a guess\n        escalations:\n        - {line}")
    expected = expected.replace("- {to: full, confidenceBelow: 0.5, share: 0.2, accuracy: 0.85}", f"- {line}")
    assert written == expected
    assert with_escalations(written, given) == written
    emptied = with_escalations(TEXT, {("classify", "vit", "old"): ()})
    assert "escalations: []  # of before" in emptied
    assert "0.85" not in emptied


def test_evaluate_writes_escalations_of_a_transformer(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The labels are the answers of `full`; `fast` merges tokens and is sometimes wrong."""
    points = [{"name": "full", "accuracy": 0.5}, {"name": "fast", "accuracy": 0.5, "merging": {"schedule": [6]}}]
    (tmp_path / "pipeline.yaml").write_text(
        dump_yaml(a_transformer_pipeline(storageUri=str(weights), operatingPoints=points))
    )
    model, pictures = load_model(spec(weights)), images(ROWS)
    labels = answers(model, "full", pictures, [0] * ROWS)["label"]
    lines = [
        json.dumps({"inputs": {"image": image.tolist()}, "outputs": {"label": [int(label)]}})
        for image, label in zip(pictures, labels, strict=True)
    ]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines))

    assert run(["evaluate", str(tmp_path), "--samples", str(tmp_path / "samples.jsonl")]) == 0

    last = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    full, fast = load_pipeline(tmp_path).spec.stages[0].variants[0].operating_points
    assert (full.accuracy, full.escalations) == (1.0, ())
    assert fast.accuracy < 0.98
    assert 0 < len(fast.escalations) == last["escalations_classify_vit_fast"]
    assert all(look.to == "full" and look.accuracy > fast.accuracy for look in fast.escalations)
