"""Accuracies and escalations measured on a user's own samples: how answers of the whole become those of variants."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders import a_pipeline, a_pipeline_document, a_stage, a_variant
from tests.cli.pipelines import TASK_INPUT, a_transformer_pipeline, echo_pipeline
from tests.model_servers.transformer.test_family import IMAGE, answers, images, spec
from tests.model_servers.transformer.test_family import weights as weights  # noqa: PLC0414  (a fixture)
from trimtab.accuracy.attribution import (
    Choice,
    NoCorrectAnswers,
    ReceivedAnswer,
    Tally,
    accuracies,
    choices,
    escalations,
    mean_confidences,
    output_shares,
    task_accuracies,
    task_accuracy_stages,
)
from trimtab.app import run
from trimtab_loadtester.payloads.interface import Score
from trimtab_loadtester.payloads.labelled import LabelledPayloads, SamplesError
from trimtab_model_servers.server.hosted_model import load_model
from trimtab_pipelines.accuracy import accuracy_sources
from trimtab_pipelines.accuracy_evidence import Accuracy, wilson_interval
from trimtab_pipelines.documents import dump_yaml, load_pipeline
from trimtab_pipelines.spec import InferencePipeline
from trimtab_training.vit_tasks.datasets import TASKS, HeldOut

HERE = "tests.cli.test_accuracy"
DIGEST = f"sha256:{64 * 'a'}"
BEST = (("slow", "default"), ("slow", "default"))
ONLY: Choice = (("small", "default"),)
ROWS = 600
POINTS = [{"name": "full", "accuracy": 0.9}, {"name": "fast", "accuracy": 0.8}]
LIGHT_FIRST, LIGHT_SECOND = (("fast", "default"), BEST[1]), (BEST[0], ("fast", "default"))


def tally(right: int, of: int = 100) -> Tally:
    return Tally.of([Score(1, 1)] * right + [Score(0, 1)] * (of - right))


def of_answers(answers: Sequence[ReceivedAnswer]) -> Tally:
    return Tally.of([answer.score for answer in answers])


def test_choices_are_the_best_and_single_changes() -> None:
    assert choices(echo_pipeline()) == [BEST, LIGHT_FIRST, LIGHT_SECOND]


def test_product_of_stage_accuracies_is_measured_share() -> None:
    shares = {BEST: 0.81, LIGHT_FIRST: 0.54, LIGHT_SECOND: 0.27}
    tallies: dict[Choice, Tally] = {choice: tally(round(100 * share)) for choice, share in shares.items()}
    means: dict[Choice, dict[str, float]] = {
        BEST: {"first": 0.97, "second": 0.9},
        LIGHT_FIRST: {"first": 0.8, "second": 0.87},
    }
    found = accuracies(echo_pipeline(), tallies, DIGEST, means)
    for choice, share in shares.items():
        first, second = (found[stage, *mine].value for stage, mine in zip(("first", "second"), choice, strict=True))
        assert first * second == pytest.approx(share, abs=2e-4)
    low, high = wilson_interval(81, 100)
    best = found["first", "slow", "default"]
    assert best == Accuracy(
        value=0.9,
        source="Measured",
        samples=100,
        low=round(low / 0.9, 4),
        high=round(high / 0.9, 4),
        samples_digest=DIGEST,
        mean_confidence=0.97,
    )
    assert found["second", "fast", "default"].mean_confidence is None
    assert found["first", "fast", "default"].confidence_shifts == {"second": -0.03}, "by its outputs"


def test_mean_confidence_needs_a_value_for_each_row() -> None:
    heard = [
        ReceivedAnswer(Score(2, 2), {"all": "0.9,0.5", "some": "0.5", "logit": "0.3"}),
        ReceivedAnswer(Score(1, 1), {"all": "0.4", "some": "", "logit": "3.1"}),
        ReceivedAnswer(Score(0, 1), {"some": "0.2"}),
    ]
    assert mean_confidences(heard) == {"all": 0.6}


def test_output_shares_are_those_of_the_classes_of_all_rows() -> None:
    outputs = [{"name": "y", "datatype": "INT64"}, {"name": "sure", "datatype": "FP32"}]
    pipeline = a_pipeline([a_stage(outputs=outputs, confidence="sure", variants=[a_variant("small")])])
    answers = [ReceivedAnswer(Score(1, 1), outputs={"y": np.array(classes)}) for classes in ([3], [7, 3], [3])]

    assert output_shares(pipeline, {ONLY: answers}) == {("first", "small", "default"): {"3": 0.75, "7": 0.25}}
    assert output_shares(pipeline, {ONLY: [ReceivedAnswer(Score(1, 1))]}) == {}


def test_correlated_answers_of_a_sample_count_once() -> None:
    """Ten equal answers to a sample count as one; ten independent ones count as ten."""
    together = Tally.of([Score(10, 10)] * 50 + [Score(0, 10)] * 50)
    apart = Tally.of([Score(5, 10), Score(4, 10), Score(6, 10)] * 40)
    assert together.effective == pytest.approx(100)
    assert apart.effective == 1200
    assert tally(50).effective == pytest.approx(100)


def test_no_correct_answer_is_an_error() -> None:
    with pytest.raises(NoCorrectAnswers, match="no sample was answered correctly"):
        accuracies(echo_pipeline(), dict.fromkeys(choices(echo_pipeline()), tally(0)), DIGEST, {})


def test_accuracy_is_shown_with_its_evidence() -> None:
    evidence = {"source": "Measured", "samples": 500, "low": 0.75, "high": 0.85}
    variants = [a_variant("small", accuracy=0.8, accuracyEvidence=evidence), a_variant("large", accuracy=0.9)]
    pipeline = InferencePipeline.model_validate(a_pipeline_document([a_stage("first", variants=variants)]))
    assert accuracy_sources(pipeline.spec.stages) == "declared and measured"
    labels = {
        variant.name: variant.points[0].measured_accuracy().evidence_label
        for variant in pipeline.spec.stages[0].variants
    }
    assert labels == {"small": "measured (n 500, 0.750–0.850)", "large": "declared"}


def test_evaluate_measures_every_variant_of_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`wrong` adds two instead of one; two of ten labels equal its outputs."""
    variants = [a_variant("wrong", parameters={"increment": 2.0}), a_variant("right", accuracy=0.6)]
    pipeline = a_pipeline([a_stage(variants=variants)], slo={"latency": "1s"})
    (tmp_path / "pipeline.yaml").write_text("# mine\n" + dump_yaml(pipeline))
    lines = [{"inputs": {"x": [1.0] * 4}, "outputs": {"y": [2.0 + (n < 2)] * 4}} for n in range(10)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert run(["evaluate", str(tmp_path), "--samples", str(tmp_path / "samples.jsonl")]) == 0

    last = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert (last["samples"], last["accuracy_first_right_default"]) == (10, 0.8)
    wrong, right = load_pipeline(tmp_path).spec.stages[0].variants
    assert (wrong.accuracy, right.accuracy) == (0.2, 0.8)
    assert (right.accuracy_evidence.source, right.accuracy_evidence.samples) == ("Measured", 10)
    assert right.accuracy_evidence.samples_digest == last["samples_digest"]
    assert (tmp_path / "pipeline.yaml").read_text().startswith("# mine\n")


def test_evaluate_without_labels_measures_agreement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The largest element of the output is that of the input, whatever a variant adds to it."""
    variants = [a_variant("more", parameters={"increment": 2.0}), a_variant("best", accuracy=0.95)]
    (tmp_path / "pipeline.yaml").write_text(dump_yaml(a_pipeline([a_stage(variants=variants)], slo={"latency": "1s"})))
    (tmp_path / "samples.jsonl").write_text('{"inputs": {"x": [1.0, 2.0, 3.0, 4.0]}}\n' * 4)

    assert run(["evaluate", str(tmp_path), "--samples", str(tmp_path)]) == 0

    printed = capsys.readouterr().out
    evidence = [variant.points[0].measured_accuracy() for variant in load_pipeline(tmp_path).spec.stages[0].variants]
    assert [(each.value, each.source, each.samples) for each in evidence] == [(1.0, "Agreement", 4)] * 2
    assert "agreement with a heavier model, which is not an accuracy" in " ".join(printed.split())
    assert json.loads(printed.splitlines()[-1])["figures"]["agreement_first_more_default"] == 1.0


def heard(task: str, right: int, of: int, confidence: float) -> list[ReceivedAnswer]:
    return [ReceivedAnswer(Score(int(n < right), 1), {"only": str(confidence)}, task) for n in range(of)]


def test_task_accuracies_include_mean_confidence() -> None:
    pipeline = a_pipeline([a_stage("only")])
    samples = [*heard("cats", 9, 10, 0.8), *heard("dogs", 0, 5, 0.4)]
    found = task_accuracies(pipeline, {ONLY: samples}, ("cats", "dogs"), DIGEST, of_answers)["only", "small", "default"]

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
        inputs=[{"name": "x", "datatype": "FP32", "shape": [4]}, {"name": "task", "datatype": "INT64", "shape": []}],
    )
    choice = (("small", "default"), ("small", "default"))
    samples = [*heard("cats", 64, 100, 0.8), *heard("dogs", 0, 100, 0.8)]
    found = task_accuracies(pipeline, {choice: samples}, ("cats", "dogs"), DIGEST, of_answers)

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


def test_invalid_task_name_is_rejected_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    def tasks(*names: str) -> tuple[str, ...]:
        monkeypatch.setattr(Named, "names", names)
        return LabelledPayloads(a_pipeline(), f"{HERE}:Named").tasks(70)

    assert sorted(tasks("cats", "dogs")) == ["cats", "dogs"]
    assert tasks("cats", "") == ()
    with pytest.raises(SamplesError, match="invalid task 'Cats'"):
        tasks("Cats")
    with pytest.raises(SamplesError, match="of 70 tasks; accuracies are reported of at most 64"):
        tasks(*(f"t{n}" for n in range(70)))


def a_confident_pipeline(confidence: str | None = "sure", stages: int = 1) -> InferencePipeline:
    outputs = [{"name": "y", "datatype": "FP32"}, {"name": "sure", "datatype": "FP32"}]
    fields: dict[str, Any] = {"outputs": outputs, "variants": [a_variant("one", accuracy=0.9, operatingPoints=POINTS)]}
    if confidence is not None:
        fields["confidence"] = confidence
    named = [a_stage("first", **fields), a_stage("second", "first.outputs.y", **fields)]
    return a_pipeline(named[:stages])


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
    found = escalations(a_confident_pipeline(), both_points())

    assert found["first", "one", "full"] == ()
    best = found["first", "one", "fast"][-1]
    assert (best.to, best.samples) == ("full", ROWS // 2), "judged on samples that chose no threshold"
    assert best.share == pytest.approx(0.3, abs=0.05)
    assert best.accuracy > 0.99


def test_samples_with_tasks_get_thresholds_by_task() -> None:
    answers_by_choice = {
        choice: [replace(one, task=("easy", "hard")[place % 2]) for place, one in enumerate(heard)]
        for choice, heard in both_points().items()
    }
    best = escalations(a_confident_pipeline(), answers_by_choice)["first", "one", "fast"][-1]

    assert set(best.by_task) == {"easy", "hard"}
    assert all(0.25 < one.confidence_below < 0.35 for one in best.by_task.values())
    some = {choice: [replace(heard[0], task=""), *heard[1:]] for choice, heard in answers_by_choice.items()}
    assert not escalations(a_confident_pipeline(), some)["first", "one", "fast"][-1].by_task, "a sample has no task"
    assert {HeldOut().task(row) for row in (0, 1_000, 2_000, 3_079)} == set(TASKS)


def test_escalations_need_a_confidence_and_single_rows() -> None:
    assert escalations(a_confident_pipeline(confidence=None), both_points()) == {}
    assert escalations(a_confident_pipeline(), both_points(rows=2)) == {}


def test_rows_of_a_sample_that_are_scored_one_by_one_escalate() -> None:
    """Samples of three rows, the last without truth, in the second stage; `fast` is wrong on unconfident rows."""
    pipeline, full, fast = a_confident_pipeline(stages=2), ("one", "full"), ("one", "fast")
    confidence = np.random.default_rng(0).random((ROWS, 3))
    labelled = np.array([True, True, False])

    def heard_from(right: np.ndarray) -> list[ReceivedAnswer]:
        scores = [Score(int(row[:2].sum()), 4, row, labelled) for row in right]
        texts = [",".join(f"{sure:.4g}" for sure in row) for row in confidence]
        return [ReceivedAnswer(score, {"second": text}) for score, text in zip(scores, texts, strict=True)]

    every = np.ones((ROWS, 3), bool)
    answers_by_choice: dict[Choice, list[ReceivedAnswer]] = {
        (full, full): heard_from(every),
        (fast, full): heard_from(every),
        (full, fast): heard_from(confidence > 0.3),
    }
    best = escalations(pipeline, answers_by_choice)["second", "one", "fast"][-1]

    assert best.samples == ROWS // 2 * 3, "all rows of every second sample are served"
    assert best.share == pytest.approx(0.3, abs=0.05)
    assert best.accuracy == pytest.approx(0.5**0.5, abs=0.01), "half of the results, by two stages alike"


def test_escalations_of_several_stages_are_attributed() -> None:
    """81 % with the best points are 90 % in each stage; `second` outputs several rows of each sample."""
    pipeline = a_confident_pipeline(stages=2)
    single = both_points()
    full, fast = ("one", "full"), ("one", "fast")
    rng = np.random.default_rng(1)
    kept = rng.random(ROWS) < 0.81
    answers_by_choice: dict[Choice, list[ReceivedAnswer]] = {
        (first, second): [
            ReceivedAnswer(Score(one.score.correct * int(hit), 1), {**one.confidences, "second": "0.9,0.9"})
            for one, hit in zip(single[first,], kept, strict=True)
        ]
        for first, second in ((full, full), (fast, full), (full, fast))
    }
    found = escalations(pipeline, answers_by_choice)
    measured = accuracies(
        pipeline, {c: Tally.of([o.score for o in a]) for c, a in answers_by_choice.items()}, DIGEST, {}
    )

    assert {stage for stage, _, _ in found} == {"first"}
    best = found["first", "one", "fast"][-1]
    assert best.accuracy == pytest.approx(measured["first", "one", "full"].value, abs=0.03)
    assert best.accuracy_low is not None
    assert best.accuracy_low < best.accuracy


def test_rows_escalate_to_other_variants_of_the_stage() -> None:
    variants = [a_variant("light", accuracy=0.8), a_variant("heavy", accuracy=0.9)]
    apart = [variants[0], variants[1] | {"resources": {"cpu": 3}}]
    outputs = [{"name": "y", "datatype": "FP32"}, {"name": "sure", "datatype": "FP32"}]
    heard = both_points()
    named: dict[Choice, list[ReceivedAnswer]] = {
        (("heavy", "default"),): heard[("one", "full"),],
        (("light", "default"),): heard[("one", "fast"),],
    }

    def found(listed: list[dict[str, Any]]) -> dict[tuple[str, str, str], Any]:
        return escalations(a_pipeline([a_stage("first", outputs=outputs, confidence="sure", variants=listed)]), named)

    best = found(variants)["first", "light", "default"][-1]
    assert (best.variant, best.to, best.samples) == ("heavy", "default", ROWS // 2)
    assert best.share == pytest.approx(0.3, abs=0.05)
    assert found(apart) == found(variants)


PICTURES = images(ROWS)


class TwoTasks:
    """Images of a transformer's two tasks, labelled with its best answers; half the labels of the second are wrong."""

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
    """`fast` merges tokens and is sometimes wrong; `tune` writes points of its own."""
    points = [POINTS[0], POINTS[1] | {"merging": {"schedule": [6]}}] if command == "evaluate" else []
    pipeline = a_transformer_pipeline([IMAGE, TASK_INPUT], storageUri=str(weights), operatingPoints=points)
    (tmp_path / "pipeline.yaml").write_text(dump_yaml(pipeline))
    given_answers = answers(load_model(spec(weights)), "full", PICTURES, [n % 2 for n in range(ROWS)])
    wrong = [n % 4 == 3 for n in range(ROWS)]
    monkeypatch.setattr(
        TwoTasks, "labels", [int(a) + w for a, w in zip(given_answers["label"], wrong, strict=True)], False
    )

    options = ["--seconds", "0"] if command == "tune" else []
    assert run([command, str(tmp_path), "--samples", f"{HERE}:TwoTasks", *options]) == 0

    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    point, *others = load_pipeline(tmp_path).spec.stages[0].variants[0].points
    one, two = point.accuracy_by_task["one"], point.accuracy_by_task["two"]
    confidence = given_answers["confidence"].numpy()
    assert (one.value, two.value, point.accuracy) == (1.0, 0.5, 0.75)
    assert (one.mean_confidence, two.mean_confidence) == pytest.approx(
        (confidence[::2].mean(), confidence[1::2].mean()), abs=1e-4
    )
    assert (one.samples, one.samples_digest) == (ROWS // 2, point.measured_accuracy().samples_digest)
    assert point.measured_accuracy().mean_confidence is None
    if command == "evaluate":
        assert figures["accuracy_classify_vit_full_two"] == 0.5
        (fast,) = others
        assert point.escalations == ()
        assert 0 < len(fast.escalations) == figures["escalations_classify_vit_fast"]
        assert all(look.to == "full" and look.accuracy > fast.accuracy for look in fast.escalations)
