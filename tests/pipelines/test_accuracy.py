"""PAS and PAS' as the IPA paper defines them."""

import pytest

from tests.builders import a_pipeline, a_stage, a_variant
from trimtab_pipelines.accuracy import normalised_ranks, pipeline_accuracy, stage_values
from trimtab_pipelines.spec import Objective


def test_pas_is_the_product():
    assert pipeline_accuracy([0.457, 0.6975], "Product") == pytest.approx(0.31876, abs=1e-5)


def test_ranks_run_from_zero_to_one():
    assert normalised_ranks([0.7, 0.5, 0.9]) == {0.5: 0.0, 0.7: 0.5, 0.9: 1.0}
    assert normalised_ranks([0.8]) == {0.8: 1.0}


def test_each_operating_point_has_its_own_value():
    points = [{"name": "full", "accuracy": 0.9}, {"name": "merged", "tokenDelta": -8, "accuracy": 0.8}]
    stage = a_pipeline([a_stage(variants=[a_variant(operatingPoints=points)])]).spec.stages[0]

    assert stage_values(stage, Objective()) == {("small", "full"): 0.9, ("small", "merged"): 0.8}
    ranked = stage_values(stage, Objective(accuracy_metric="NormalizedRanks"))
    assert ranked == {("small", "full"): 1.0, ("small", "merged"): 0.0}
