"""In-place edits of YAML: only accuracies and escalations change, and a second edit changes nothing."""

import re

import pytest

from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_pipelines.escalation import Escalation, TaskEscalation
from trimtab_pipelines.yaml_edit import with_accuracies, with_escalations

TEXT = """\
# A comment that stays.
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
      - name: block
        accuracy: 0.6
        accuracyEvidence: {source: Declared}  # not measured
        accuracyByTask:
          cats: {value: 0.1}  # of before
          birds:
            value: 0.2
        escalations:
        - {to: full, confidenceBelow: 0.5, share: 0.2, accuracy: 0.85}  # of before
      - {name: flow, accuracy: 0.6, accuracyByTask: {cats: {value: 0.1}}}
      - {name: empty, accuracy: 0.6, accuracyByTask: {}}
      - name: new
        accuracy: 0.6   # a guess"""
MEASURED = """\
# A comment that stays.
spec:
  stages:
  - name: first
    variants:
    - name: fast  # light
      accuracy: 0.11   # a guess
      accuracyEvidence: {@0.11}
      accuracyByTask:
        cats: @0.75
        'on': @0.25
      resources: &same {cpu: 500m}
    - {name: slow, accuracy: 0.22, accuracyEvidence: {@0.22}, resources: *same}
  - name: second
    variants:
    - name: both
      accuracy: 0.44
      accuracyEvidence:
        {@0.44}

      operatingPoints:
      - {name: full, accuracy: 0.33, accuracyEvidence: {@0.33}}
      - name: block
        accuracy: 0.44
        accuracyEvidence: {@0.44}  # not measured
        accuracyByTask:
          cats: @0.75  # of before
          birds:
            value: 0.2
          'on': @0.25
        escalations:
        - {to: full, confidenceBelow: 0.5, share: 0.2, accuracy: 0.85}  # of before
      - {name: flow, accuracy: 0.44, accuracyEvidence: {@0.44}, accuracyByTask: {cats: @0.75, 'on': @0.25}}
      - {name: empty, accuracy: 0.44, accuracyEvidence: {@0.44}, accuracyByTask: {cats: @0.75, 'on': @0.25}}
      - name: new
        accuracy: 0.44   # a guess
        accuracyEvidence: {@0.44}
        accuracyByTask:
          cats: @0.75
          'on': @0.25"""
POINTS = ("block", "flow", "empty", "new")
DIGEST = f"sha256:{64 * 'a'}"


def measured(value: float) -> Accuracy:
    known = {"mean_confidence": value, "samples_digest": DIGEST}
    return Accuracy(value=value, source="Measured", samples=9, low=value, high=value, **known)


def test_accuracies_replace_only_their_own() -> None:
    values = {("first", "fast", "default"): 0.11, ("first", "slow", "default"): 0.22, ("second", "both", "full"): 0.33}
    values |= {("second", "both", name): 0.44 for name in POINTS}
    tasks = {"cats": measured(0.75), "on": measured(0.25)}
    by_task = {("second", "both", name): tasks for name in POINTS} | {("first", "fast", "default"): tasks}

    def edited(text: str) -> str:
        return with_accuracies(text, {place: measured(value) for place, value in values.items()}, by_task)

    evidence = rf"source: Measured, samples: 9, low: \1, high: \1, meanConfidence: \1, samplesDigest: '{DIGEST}'"
    expected = re.sub(r"\{@(\d\.\d\d)\}", f"{{{evidence}}}", MEASURED)
    assert edited(TEXT) == re.sub(r"@(\d\.\d\d)", rf"{{value: \1, {evidence}}}", expected)
    assert edited(edited(TEXT)) == edited(TEXT)


@pytest.mark.parametrize("tasks", [{}, {"cars": TaskEscalation(confidence_below=0, share=0, accuracy=0.9)}])
def test_escalations_replace_only_their_own(tasks: dict[str, TaskEscalation]) -> None:
    known = {"accuracy": 0.86, "accuracy_low": 0.84, "samples": 500}
    escalation = Escalation(to="full", confidence_below=0.4, share=0.1, by_task=tasks, **known)
    given: dict[tuple[str, str, str], tuple[Escalation, ...]] = {
        ("second", "both", name): (escalation,) for name in ("block", "flow", "new")
    }
    written = with_escalations(TEXT, given | {("second", "both", "full"): ()})

    by_task = ", byTask: {cars: {confidenceBelow: 0, share: 0, accuracy: 0.9}}" if tasks else ""
    line = f"{{to: full, confidenceBelow: 0.4, share: 0.1, accuracy: 0.86{by_task}, accuracyLow: 0.84, samples: 500}}"
    expected = TEXT.replace("{cats: {value: 0.1}}}", f"{{cats: {{value: 0.1}}}}, escalations: [{line}]}}")
    expected = expected.replace("{to: full, confidenceBelow: 0.5, share: 0.2, accuracy: 0.85}", line)
    assert written == f"{expected}\n        escalations:\n        - {line}"
    assert with_escalations(written, given) == written
    assert line in with_escalations(TEXT, {("first", "fast", "default"): (escalation,)})
    assert "escalations: []  # of before" in with_escalations(TEXT, {("second", "both", "block"): ()})


def test_escalations_of_a_variant_follow_its_alias() -> None:
    """The value of `resources` is written at the first variant; the second gets its escalations at its own end."""
    text = TEXT.replace("    - {name: slow, accuracy: 0.6, resources: *same}", ALIASED)
    escalation = Escalation(to="default", variant="fast", confidence_below=0.4, share=0.1, accuracy=0.9)
    written = with_escalations(text, {("first", "slow", "default"): (escalation,)})

    line = "{to: default, variant: fast, confidenceBelow: 0.4, share: 0.1, accuracy: 0.9}"
    assert written == text.replace(ALIASED, f"{ALIASED}\n      escalations:\n      - {line}")
    assert with_escalations(written, {("first", "slow", "default"): (escalation,)}) == written


ALIASED = """\
    - name: slow
      accuracy: 0.6
      resources: *same  # as above"""
