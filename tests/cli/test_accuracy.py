"""Accuracies measured on a user's own samples: how answers of the whole become accuracies of variants, and text."""

import json
from pathlib import Path

import pytest

from tests.builders import a_pipeline, a_pipeline_document, a_stage, a_variant
from tests.cli.pipelines import echo_pipeline
from trimtab.accuracy.attribution import (
    Choice,
    NoCorrectAnswers,
    ReceivedAnswer,
    Tally,
    accuracies,
    choices,
    mean_confidences,
)
from trimtab.app import run
from trimtab_loadtester.payloads.interface import Score
from trimtab_pipelines.accuracy import accuracy_sources
from trimtab_pipelines.accuracy_evidence import Accuracy, wilson_interval
from trimtab_pipelines.documents import dump_yaml, load_pipeline
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.yaml_edit import with_accuracies

DIGEST = f"sha256:{64 * 'a'}"
BEST = (("slow", "default"), ("slow", "default"))
LIGHT_FIRST, LIGHT_SECOND = (("fast", "default"), BEST[1]), (BEST[0], ("fast", "default"))


def tally(right: int, of: int = 100) -> Tally:
    return Tally.of([Score(1, 1)] * right + [Score(0, 1)] * (of - right))


def test_choices_are_the_best_and_single_changes() -> None:
    assert choices(echo_pipeline()) == [BEST, LIGHT_FIRST, LIGHT_SECOND]


def test_product_of_stage_accuracies_is_measured_share() -> None:
    shares = {BEST: 0.81, LIGHT_FIRST: 0.54, LIGHT_SECOND: 0.27}
    tallies: dict[Choice, Tally] = {choice: tally(round(100 * share)) for choice, share in shares.items()}
    found = accuracies(echo_pipeline(), tallies, DIGEST, {BEST: {"first": 0.97}})
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
    assert found["second", "slow", "default"].mean_confidence is None


def test_mean_confidence_needs_a_value_for_each_row() -> None:
    heard = [
        ReceivedAnswer(Score(2, 2), {"all": "0.9,0.5", "some": "0.5", "logit": "0.3"}),
        ReceivedAnswer(Score(1, 1), {"all": "0.4", "some": "", "logit": "3.1"}),
    ]
    assert mean_confidences(heard) == {"all": 0.6}


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


TEXT = """\
# A comment that stays.
apiVersion: trimtab.dev/v1alpha1
spec:
  stages:
  - name: first
    variants:
    - name: fast  # light
      accuracy: 0.5   # a guess
      resources: &same {cpu: 500m}
    - {name: slow, accuracy: 0.6, resources: *same}
  - name: second
    variants:
    - name: both
      accuracy: 0.7
      accuracyEvidence:
        source: Published
        samples: 7

      operatingPoints:
      - {name: full, accuracy: 0.7, accuracyEvidence: {source: Declared}}
      - name: small
        accuracy: 0.6"""


def measured(value: float) -> Accuracy:
    return Accuracy(value=value, source="Measured", samples=9, low=value, high=value, samples_digest=DIGEST)


def test_yaml_edit_changes_only_accuracies() -> None:
    places = {("first", "fast", "default"): 0.11, ("first", "slow", "default"): 0.22}
    places |= {("second", "both", "full"): 0.33, ("second", "both", "small"): 0.44}
    written = with_accuracies(TEXT, {place: measured(value) for place, value in places.items()})

    def evidence(value: str) -> str:
        bounds = f"low: {value}, high: {value}"
        return f"accuracyEvidence: {{source: Measured, samples: 9, {bounds}, samplesDigest: '{DIGEST}'}}"

    expected = TEXT.replace("accuracy: 0.5   # a guess", f"accuracy: 0.11   # a guess\n      {evidence('0.11')}")
    expected = expected.replace("accuracy: 0.6, ", f"accuracy: 0.22, {evidence('0.22')}, ")
    expected = expected.replace("accuracy: 0.7\n", "accuracy: 0.44\n")
    expected = expected.replace(
        "accuracyEvidence:\n        source: Published\n        samples: 7\n", evidence("0.44") + "\n"
    )
    expected = expected.replace(
        "accuracy: 0.7, accuracyEvidence: {source: Declared}", f"accuracy: 0.33, {evidence('0.33')}"
    )
    expected = expected.replace(
        "small\n        accuracy: 0.6", f"small\n        accuracy: 0.44\n        {evidence('0.44')}"
    )
    # A block that took the place of another begins where that began: on a line of its own.
    assert written.replace("accuracyEvidence:\n        {", "accuracyEvidence: {") == expected
    assert with_accuracies(written, {place: measured(value) for place, value in places.items()}) == written


def test_mean_confidence_is_written_with_its_accuracy() -> None:
    known = measured(0.11).model_copy(update={"mean_confidence": 0.9})
    written = with_accuracies(TEXT, {("first", "fast", "default"): known})

    assert "high: 0.11, meanConfidence: 0.9, samplesDigest" in written
    assert written.count("meanConfidence") == 1


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
    right, wrong = a_variant("right", accuracy=0.6), a_variant("wrong", accuracy=0.5, parameters={"increment": 2.0})
    pipeline = a_pipeline([a_stage("first", variants=[wrong, right])], slo={"latency": "1s"})
    (tmp_path / "pipeline.yaml").write_text("# mine\n" + dump_yaml(pipeline))
    inputs, (output,) = (
        {spec.name: [1.0] * max(spec.shape[0], 1) for spec in pipeline.spec.inputs},
        pipeline.spec.outputs,
    )
    (name,) = inputs
    lines = [{"inputs": inputs, "outputs": {output.name: [2.0 + (n < 2)] * len(inputs[name])}} for n in range(10)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert run(["evaluate", str(tmp_path), "--samples", str(tmp_path / "samples.jsonl")]) == 0

    last = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert (last["samples"], last["accuracy_first_right_default"]) == (10, 0.8)
    stage = load_pipeline(tmp_path).spec.stages[0]
    found = stage.variant("right")
    assert (found.accuracy, found.accuracy_evidence.source, found.accuracy_evidence.samples) == (0.8, "Measured", 10)
    assert found.accuracy_evidence.samples_digest == last["samples_digest"]
    assert stage.variant("wrong").accuracy == 0.2
    assert (tmp_path / "pipeline.yaml").read_text().startswith("# mine\n")
