"""Plans stand on accuracies as they are observed, where these are not what was measured."""

import pytest

from tests.adapter.test_allowed_points import SECONDS
from tests.adapter.test_escalation import ESCALATION, POINTS, STAGE
from tests.builders import a_pipeline, a_point_profile, a_profile, a_stage, a_variant, point_profiles
from trimtab_adapter.controller import Controller
from trimtab_adapter.observation import State, merge_states, read_state
from trimtab_adapter.planning.decide import decide
from trimtab_adapter.planning.drift_correction import apply_observed_accuracy, apply_observed_shares, drifted_points
from trimtab_pipelines.plan import ForecastRecord
from trimtab_predictor.forecaster import ReactiveForecaster


def inputs_after(state, current=None):
    """The planning inputs after a router reported this state."""
    controller = Controller(ReactiveForecaster())
    controller.update(state)
    return controller.planning_inputs(ForecastRecord(peak_rps=1.0, source="reactive"), current, 0.0, 10.0)


def plan_after(reported):
    """The plan after a router reported these accuracies."""
    state = read_state({"stages": {"only": {"variant": "small", "drifted_accuracies": reported}}})
    one = a_stage("only", variants=[a_variant(operatingPoints=POINTS)], batchSizes=[1, 8]) | STAGE
    pipeline = a_pipeline([one], schedulingPolicy="ModalityMix", objective={"goal": "MaxAccuracy"})
    return decide(pipeline, {"only": a_profile("only", point_profiles(SECONDS))}, inputs_after(state)).spec


def test_drifted_point_is_no_longer_planned():
    before, after = plan_after({}), plan_after({"full": 0.6})

    assert (before.stages[0].operating_point, before.explanation.drifted_accuracies) == ("full", ())
    assert (after.stages[0].operating_point, after.expected.accuracy) == ("half", 0.8)
    assert after.explanation.drifted_accuracies == ("only: small/full: 0.60 instead of 0.90",)


def test_escalations_change_with_their_points():
    own = {"cars": {"confidenceBelow": 0.6, "share": 0.5, "accuracy": 0.9, "accuracyLow": 0.88}}
    points = [POINTS[0], POINTS[1] | {"escalations": [ESCALATION | {"byTask": own}]}]
    stage = a_stage("only", variants=[a_variant(operatingPoints=points)], batchSizes=[1, 8]) | STAGE
    observed = {("only", "small", "full", ""): 0.86, ("only", "small", "half", ""): 0.7}
    full, half = apply_observed_accuracy(a_pipeline([stage]).spec, observed).stages[0].variants[0].points
    on_cars = half.escalations[0].by_task["cars"]

    assert full.accuracy_evidence is not None
    assert full.accuracy_evidence.low == pytest.approx(0.845)
    assert half.escalations[0].accuracy == pytest.approx(0.89 - 0.75 * 0.1 - 0.25 * 0.04)
    assert on_cars.accuracy == pytest.approx(0.9 - 0.5 * 0.1 - 0.5 * 0.04)
    assert on_cars.accuracy_low == pytest.approx(0.88 - 0.07)


def test_escalation_changes_with_a_point_of_another_variant():
    escalation = ESCALATION | {"variant": "large", "to": "default"}
    variants = [a_variant(accuracy=0.8, escalations=[escalation]), a_variant("large", accuracy=0.9)]
    spec = a_pipeline([a_stage("only", variants=variants) | STAGE]).spec

    def escalations(large):
        small, _ = apply_observed_accuracy(spec, {("only", "large", "default", ""): large}).stages[0].variants
        return small.escalations

    assert [found.accuracy for found in escalations(0.86)] == pytest.approx([0.89 - 0.25 * 0.04])
    assert not escalations(0.7), "no longer more accurate than the first variant"


def test_task_accuracies_move_with_their_point_and_reports():
    def on(**by_task):
        tasks = {
            task: {"value": one, "source": "Measured", "low": one - 0.02, "high": one + 0.02}
            for task, one in by_task.items()
        }
        return {"accuracyByTask": tasks}

    points = [POINTS[0] | on(cars=0.95, cats=0.85), POINTS[1] | {"escalations": [], **on(cars=0.8, cats=0.7)}]
    asked = a_pipeline([a_stage("only", variants=[a_variant(operatingPoints=points)], batchSizes=[1, 8]) | STAGE]).spec
    reported = {"drifted_accuracies": {"full": 0.6}, "drifted_by_task": {"full": {"cats": 0.85}, "half": {"cars": 0.4}}}
    state = read_state({"stages": {"only": {"variant": "small", **reported}}})
    counted = apply_observed_accuracy(asked, merge_states([state, state]).accuracies)
    full, half = counted.stages[0].variants[0].points

    assert {task: one.value for task, one in full.accuracy_by_task.items()} == pytest.approx(
        {"cars": 0.65, "cats": 0.85}
    ), "no report on cars, which fall with their point; the report on cats confirms them"
    assert full.accuracy_by_task["cars"].high == pytest.approx(0.67)
    assert {task: one.value for task, one in half.accuracy_by_task.items()} == pytest.approx({"cars": 0.4, "cats": 0.7})
    assert half.accuracy == 0.8
    assert drifted_points(asked, counted) == (
        "only: small/full: 0.60 instead of 0.90",
        "only: small/half on cars: 0.40 instead of 0.80",
    )


def test_observation_within_rounding_keeps_the_measured_accuracy():
    """A task without a report, here cars, falls with its variant."""
    measured = {"cars": 0.9, "cats": 0.868, "dogs": 0.9}
    tasks = {name: {"value": value, "source": "Measured"} for name, value in measured.items()}
    asked = a_pipeline([a_stage("only", variants=[a_variant(accuracy=0.8, accuracyByTask=tasks)])]).spec
    reported = {"": 0.7, "cats": 0.868, "dogs": 0.6}
    state = State(accuracies={("only", "small", "default", task): one for task, one in reported.items()})
    counted = apply_observed_accuracy(asked, inputs_after(state).accuracies)

    point = counted.stages[0].variants[0].points[0]
    assert {task: one.value for task, one in point.accuracy_by_task.items()} == pytest.approx(
        {"cars": 0.8, "cats": 0.868, "dogs": 0.6}
    )
    assert point.accuracy == pytest.approx(0.7)
    assert drifted_points(asked, counted) == (
        "only: small/default: 0.70 instead of 0.80",
        "only: small/default on dogs: 0.60 instead of 0.90",
    )


def test_point_best_for_a_registered_task_stays_allowed():
    worse = [{"name": "full", "accuracy": 0.9}, {"name": "half", "accuracy": 0.7}, {"name": "third", "accuracy": 0.6}]
    stage = a_stage("only", variants=[a_variant(operatingPoints=worse)], batchSizes=[1, 8])
    pipeline = a_pipeline([stage], schedulingPolicy="TokenAdaptive", objective={"goal": "MaxAccuracy"})
    points = point_profiles(SECONDS | {"third": (0.005, 0.003)})
    registered_accuracies = {"small": {"half": {"new": {"value": 0.5}}, "third": {"new": {"value": 0.8, "low": 0.7}}}}
    before = None
    for reported, kept in (
        ({}, ["full", "half"]),
        (registered_accuracies, ["full", "half", "third"]),
        ({}, ["full", "half"]),
    ):
        state = read_state({"stages": {"only": {"registered_accuracies": reported}}})
        plan = decide(pipeline, {"only": a_profile("only", points)}, inputs_after(state, before))

        found = {point.name: point.accuracy_by_task for point in plan.spec.stages[0].points}
        by_point = reported.get("small", {})
        assert found == {point: {task: one["value"] for task, one in by_point.get(point, {}).items()} for point in kept}
        assert before is None or plan.spec.generation == before.spec.generation + 1
        before = plan


@pytest.mark.parametrize(("basis", "counts"), [("Expected", 0.8), ("LowerBound", 0.7)])
def test_registered_task_drifts_like_those_of_the_pipeline(basis, counts):
    pipeline = a_pipeline([a_stage("only")], objective={"goal": "MaxAccuracy", "accuracyBasis": basis})
    new = {"value": 0.8, "low": 0.7, "high": 0.9, "samples": 99, "source": "Measured"}
    for drifted, change in (({}, 0.0), ({"default": {"new": 0.5}}, -0.3)):
        stage = {
            "variant": "small",
            "registered_accuracies": {"small": {"default": {"new": new}}},
            "drifted_by_task": drifted,
        }
        inputs = inputs_after(read_state({"stages": {"only": stage}}))
        plan = decide(pipeline, {"only": a_profile("only", [a_point_profile()])}, inputs).spec

        assert plan.stages[0].accuracy_by_task == {"new": pytest.approx(counts + change)}
        assert plan.explanation.drifted_accuracies == (
            ("only: small/default on new: 0.50 instead of 0.80",) if drifted else ()
        )


def test_observed_shares_of_escalations_are_planned_with():
    half = POINTS[1] | {"escalations": [ESCALATION, ESCALATION | {"confidenceBelow": 0.9, "share": 0.5}]}
    stage = a_stage("only", variants=[a_variant(operatingPoints=[POINTS[0], half])], batchSizes=[1, 8]) | STAGE
    spec = a_pipeline([stage]).spec
    low = {"variant": "small", "operating_point": "half", "confidence_below": ESCALATION["confidenceBelow"]}

    def shares_after(rows, low_rows):
        report = {"stages": {"only": {"low_confidence": [low | {"rows": rows, "low_rows": low_rows}]}}}
        state = merge_states([read_state(report), read_state(report)])
        changed, phrases = apply_observed_shares(spec, inputs_after(state).escalated_shares)
        return [each.share for each in changed.stages[0].variants[0].points[1].escalations], phrases

    assert shares_after(1000, 400) == ([0.4, pytest.approx(2 / 3, abs=1e-4)], shares_after(1000, 400)[1])
    assert shares_after(1000, 400)[1][0].startswith("only: 40% of the rows of small/half have a confidence below")
    assert shares_after(1000, 260) == ([0.25, 0.5], ()), "within noise"
    assert shares_after(400, 160) == ([0.25, 0.5], ()), "too few rows"
