"""Strategies of what was profiled: for variants of several operating points alone."""

import pytest

from tests.builders import a_chain, a_pipeline, a_point_profile, a_profile, a_variant
from trimtab_profiler.strategies import strategies_from


def two_points():
    """A pipeline of which one stage has two points, and its profiles."""
    chain = a_chain(2)
    points = [{"name": "full", "accuracy": 0.9}, {"name": "half", "accuracy": 0.8}]
    chain[0]["variants"] = [a_variant(operatingPoints=points)]
    measured = [
        a_point_profile("small", 0.004, linear).model_copy(update={"operating_point": name})
        for name, linear in (("full", 0.004), ("half", 0.001))
    ]
    profiles = {"stage-0": a_profile("stage-0", measured), "stage-1": a_profile("stage-1", [a_point_profile()])}
    return a_pipeline(chain), profiles


def test_variants_of_several_points_have_strategies_for_every_size():
    (found,) = strategies_from(*two_points())

    assert (found.stage, found.variant, len(found.sizes)) == ("stage-0", "small", 64)
    cheapest = found.of(64).cheapest(0.85)
    assert cheapest is not None
    assert cheapest.rows == {"full": 32, "half": 32}


@pytest.mark.parametrize(("basis", "worst"), [("Expected", 0.8), ("LowerBound", 0.7)])
def test_the_figure_that_counts_is_that_of_plans(basis, worst):
    pipeline, profiles = two_points()
    document = pipeline.model_dump(mode="json", by_alias=True, exclude_none=True)
    document["spec"]["objective"]["accuracyBasis"] = basis
    half = document["spec"]["stages"][0]["variants"][0]["operatingPoints"][1]
    half["accuracyEvidence"] = {"source": "Measured", "samples": 9, "low": 0.7, "high": 0.9}
    (found,) = strategies_from(type(pipeline).model_validate(document), profiles, 2)

    assert found.of(2).strategies[0].accuracy == pytest.approx(worst)


def test_second_looks_are_ways_too_where_both_points_were_measured():
    look = {"share": 0.25, "below": 0.5, "accuracy": 0.89}
    looks = [look | {"point": "full"}, look | {"point": "unmeasured", "accuracy": 0.95}]
    points = [
        {"name": "full", "accuracy": 0.9},
        {"name": "half", "accuracy": 0.8, "escalations": looks},
        {"name": "unmeasured", "accuracy": 0.99},
    ]
    chain = a_chain(1)
    chain[0]["outputs"].append({"name": "confidence", "datatype": "FP32"})
    chain[0] |= {"variants": [a_variant(operatingPoints=points)], "confidence": "confidence"}
    measured = [
        a_point_profile("small", 0.004, linear).model_copy(update={"operating_point": name})
        for name, linear in (("full", 0.004), ("half", 0.001))
    ]
    (found,) = strategies_from(a_pipeline(chain), {"stage-0": a_profile("stage-0", measured)})

    assert {way.name for way in found.ways} == {"full", "half", "half>full@0.25"}
    cheapest = found.of(64).cheapest(0.89)
    assert cheapest is not None
    assert cheapest.rows == {"half>full@0.25": 64}


def test_where_there_is_one_point_each_there_is_nothing_to_split():
    profiles = {"stage-0": a_profile("stage-0", [a_point_profile()])}

    assert strategies_from(a_pipeline(), profiles) == ()
