"""Strategies beside a profile: for variants of several operating points alone."""

import json

from tests.builders import a_chain, a_pipeline, a_point_profile, a_profile, a_variant
from trimtab_pipelines.documents import parse
from trimtab_pipelines.strategies import StrategiesOfPipeline
from trimtab_profiler.strategies import strategies_from, write_strategies


def test_variants_of_several_points_have_strategies_that_read_back(tmp_path):
    chain = a_chain(2)
    points = [{"name": "full", "accuracy": 0.9}, {"name": "half", "accuracy": 0.8}]
    chain[0]["variants"] = [a_variant(operatingPoints=points)]
    measured = [
        a_point_profile("small", 0.004, linear).model_copy(update={"operating_point": name})
        for name, linear in (("full", 0.004), ("half", 0.001))
    ]
    profiles = {"stage-0": a_profile("stage-0", measured), "stage-1": a_profile("stage-1", [a_point_profile()])}
    pipeline = a_pipeline(chain)
    path = write_strategies(pipeline, profiles, tmp_path)
    assert path is not None
    found = parse(StrategiesOfPipeline, json.loads(path.read_text()), str(path))

    assert found == strategies_from(pipeline, profiles)
    assert [(one.stage, one.variant, len(one.sizes)) for one in found.variants] == [("stage-0", "small", 64)]
    cheapest = found.variants[0].of(64).cheapest(0.85)
    assert cheapest is not None
    assert cheapest.rows == {"full": 32, "half": 32}


def test_second_looks_are_ways_too_where_both_points_were_measured():
    look = {"share": 0.25, "below": 0.5, "accuracy": 0.89}
    looks = [look | {"point": "full"}, look | {"point": "unmeasured", "accuracy": 0.95}]
    points = [
        {"name": "full", "accuracy": 0.9},
        {"name": "half", "accuracy": 0.8, "secondLooks": looks},
        {"name": "unmeasured", "accuracy": 0.99},
    ]
    chain = a_chain(1)
    chain[0]["outputs"].append({"name": "certainty", "datatype": "FP32"})
    chain[0] |= {"variants": [a_variant(operatingPoints=points)], "certainty": "certainty"}
    measured = [
        a_point_profile("small", 0.004, linear).model_copy(update={"operating_point": name})
        for name, linear in (("full", 0.004), ("half", 0.001))
    ]
    (found,) = strategies_from(a_pipeline(chain), {"stage-0": a_profile("stage-0", measured)}).variants

    assert {way.name for way in found.ways} == {"full", "half", "half>full@0.25"}
    cheapest = found.of(64).cheapest(0.89)
    assert cheapest is not None
    assert cheapest.rows == {"half>full@0.25": 64}


def test_where_there_is_one_point_each_nothing_is_written(tmp_path):
    profiles = {"stage-0": a_profile("stage-0", [a_point_profile()])}

    assert write_strategies(a_pipeline(), profiles, tmp_path) is None
    assert not list(tmp_path.iterdir())
