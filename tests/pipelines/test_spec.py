"""Validation of pipelines: messages name the field and suggest a correction."""

import re
from pathlib import Path

import pytest

from tests.builders import a_pipeline, a_pipeline_document, a_stage, a_variant
from tests.pipelines.invalid_documents import INVALID, POINTED, Invalid
from trimtab_pipelines.documents import DocumentError, load_pipeline, parse
from trimtab_pipelines.kubernetes_names import advisory_name
from trimtab_pipelines.spec import InferencePipeline


def rejection(document):
    with pytest.raises(DocumentError) as error:
        parse(InferencePipeline, document, "pipeline.yaml")
    return str(error.value)


def a_fan_out():
    """A finder that produces a number of crops per row, and a reader of crops."""
    find = a_stage(
        "find",
        outputs=[
            {"name": "count", "datatype": "INT64"},
            {"name": "y", "datatype": "FP32", "shape": [4], "countedBy": "count", "expectedRows": 2.5},
        ],
    )
    return [find, a_stage("read", "find.outputs.y")]


def test_variant_without_points_has_a_default_point():
    variant = a_pipeline().spec.stages[0].variants[0]

    assert [(point.name, point.accuracy) for point in variant.points] == [("default", 0.9)]


def test_fan_out_multiplies_rows_of_later_stages():
    spec = a_pipeline(a_fan_out()).spec

    assert spec.row_domains == {"find": "request", "read": "find.outputs.count"}
    assert spec.expected_rows == {"find": 1.0, "read": 2.5}


def test_stages_are_ordered_topologically():
    stages = [a_stage("last", "middle.outputs.y"), a_stage("middle", "first.outputs.y"), a_stage("first")]

    assert [stage.name for stage in a_pipeline(stages).spec.ordered_stages] == ["first", "middle", "last"]


@pytest.mark.parametrize("invalid", INVALID.values(), ids=INVALID)
def test_invalid_document_is_rejected(invalid: Invalid):
    document = a_pipeline_document()
    invalid.change(document)

    assert re.search(invalid.model, rejection(document))


def test_satisfiable_pin_is_accepted():
    pin = {"operatingPoint": "fast", "batchSize": 8, "replicas": 2}
    (stage,) = a_pipeline([a_stage(variants=[a_variant(), POINTED], pin=pin, minReplicas=2)]).spec.stages

    assert (stage.pin.operating_point, stage.pin.batch_size, stage.pin.replicas) == ("fast", 8, 2)


def test_budget_below_one_replica_per_stage_is_rejected():
    assert "budget.cores 0.1 cannot hold" in rejection(a_pipeline_document(budget={"cores": "100m"}))


def test_inputs_with_different_rows_are_rejected():
    mixed = a_stage(
        "mixed", inputs=[{"name": "x", "from": "request.inputs.x"}, {"name": "z", "from": "find.outputs.y"}]
    )

    assert "have different rows" in rejection(a_pipeline_document([*a_fan_out(), mixed]))


def test_too_many_options_are_rejected():
    sizes = list(range(1, 33))
    few, many = ([a_variant(f"v{n}") for n in range(count)] for count in (4, 64))
    stages = [a_stage(f"s{n}", variants=many, batchSizes=sizes) for n in range(4)]
    stages[0]["variants"] = few

    assert sum(stage.option_count for stage in a_pipeline(stages).spec.stages) == 6272
    document = a_pipeline_document([*stages, a_stage("s4", variants=many, batchSizes=sizes)])
    message = rejection(document)
    assert "8320 options" in message
    assert "2048 of them in s1" in message


def test_advisory_names_are_unique_and_bounded():
    assert advisory_name("digits") == "digits-advisory"
    assert len({advisory_name("d" * length) for length in (40, 43, 44, 50, 63)}) == 5
    assert all(advisory_name("d" * length).endswith("-advisory") for length in (43, 44, 63))


def test_client_supplied_references_are_rejected():
    document = load_pipeline(Path("pipelines/lmm-digits/pipeline.yaml")).model_dump(mode="json", by_alias=True)
    document["spec"]["inputs"].append({"name": "places", "datatype": "BYTES", "optional": True})
    read = {"name": "references", "from": "request.inputs.places", "optional": True}
    document["spec"]["stages"][0]["inputs"].append(read)

    assert "stage answer: references are URLs" in rejection(document)
