"""Plans stand on accuracies as they are observed, where these are not what was measured."""

import pytest

from tests.adapter.test_escalation import POINTS, STAGE
from tests.builders import a_pipeline, a_point_profile, a_profile, a_stage, a_variant
from trimtab_adapter.deliberation import Deliberation
from trimtab_adapter.observation import ObservationError, read_state
from trimtab_adapter.planning.corrected import corrected
from trimtab_adapter.planning.decide import decide
from trimtab_pipelines.plan import ForecastRecord


def the_pipeline():
    one = a_stage("only", variants=[a_variant(operatingPoints=POINTS)], batchSizes=[1, 8]) | STAGE
    return a_pipeline([one], departurePolicy="ModalityMix", objective={"goal": "MaxAccuracy"})


def plan_after(told):
    """The plan once a router told of these accuracies."""
    laws = {"full": (0.040, 0.010), "half": (0.004, 0.002)}
    points = [a_point_profile("small", *law).model_copy(update={"operating_point": n}) for n, law in laws.items()]
    deliberation = Deliberation()
    deliberation.learn(read_state({"stages": {"only": {"variant": "small", "drifted_accuracies": told}}}))
    forecast = ForecastRecord(peak_rps=1.0, source="reactive")
    return decide(
        the_pipeline(),
        {"only": a_profile("only", points)},
        deliberation.situation(forecast, None, now_seconds=0.0, hold_seconds=10.0),
    ).spec


def test_a_point_that_is_no_longer_the_best_is_no_longer_planned():
    before, after = plan_after({}), plan_after({"full": 0.6})

    assert (before.stages[0].operating_point, before.explanation.accuracies_drifted) == ("full", ())
    assert (after.stages[0].operating_point, after.expected.accuracy) == ("half", 0.8)
    assert after.explanation.accuracies_drifted == ("only: small/full, 0.60 and not 0.90",)


def test_second_looks_change_by_what_their_points_do():
    spec = corrected(the_pipeline().spec, {("only", "small", "full"): 0.86, ("only", "small", "half"): 0.7})
    full, half = spec.stages[0].variants[0].points

    assert full.accuracy_evidence is not None
    assert full.accuracy_evidence.low == pytest.approx(0.845)
    assert half.second_looks[0].accuracy == pytest.approx(0.89 - 0.75 * 0.1 - 0.25 * 0.04)


def test_an_accuracy_that_cannot_be_is_not_believed():
    with pytest.raises(ObservationError, match=r"drifted_accuracies.full is 1.2; expected 0 to 1"):
        plan_after({"full": 1.2})
