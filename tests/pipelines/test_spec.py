"""Validation of pipelines: messages name the field and suggest a correction."""

import copy
from pathlib import Path

import pytest

from tests.builders import a_pipeline, a_pipeline_document, a_stage, a_variant
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


def test_quantities_and_durations_are_parsed():
    pipeline = a_pipeline([a_stage(variants=[a_variant(resources={"cpu": "250m", "memory": "64Mi"})])])

    assert pipeline.spec.slo.latency_seconds == 0.5
    assert pipeline.spec.stages[0].variants[0].resources.cpu == 0.25
    assert pipeline.spec.stages[0].variants[0].resources.memory == 64 * 2**20


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


@pytest.mark.parametrize(
    ("change", "field", "hint"),
    [
        ({"slo": {"latency": "fast"}}, "spec.slo.latency", "250ms"),
        ({"slo": {"latency": "-1s"}}, "spec.slo.latency", "250ms"),
        ({"budget": {"cores": "two"}}, "spec.budget.cores", "500m"),
        ({"budget": {"cores": "100m"}}, "spec", "budget.cores 0.1 cannot hold"),
        ({"dropPolicy": "Sometimes"}, "spec.dropPolicy", "'Predicted', 'Expired' or 'Never'"),
        ({"objective": {"goal": "MinCost"}}, "spec.objective", "accuracyFloor"),
        ({"sla": "1s"}, "spec.sla", "unknown field"),
        ({"outputs": [{"name": "y", "from": "nowhere.outputs.y"}]}, "spec", "is unknown"),
        ({"inputs": []}, "spec.inputs", "at least 1"),
        ({"adaptation": {"interval": "999ms"}}, "spec.adaptation.interval", "greater than or equal to 1"),
    ],
)
def test_invalid_field_is_named(change, field, hint):
    message = rejection(a_pipeline_document(**change))

    assert message.startswith(f"pipeline.yaml: {field}: ")
    assert hint in message


POINTED = a_variant(
    "pointed", maxBatchSize=8, operatingPoints=[{"name": name, "accuracy": 0.9} for name in ("full", "fast")]
)


def test_satisfiable_pin_is_accepted():
    pin = {"operatingPoint": "fast", "batchSize": 8, "replicas": 2}
    (stage,) = a_pipeline([a_stage(variants=[a_variant(), POINTED], pin=pin, minReplicas=2)]).spec.stages

    assert (stage.pin.operating_point, stage.pin.batch_size, stage.pin.replicas) == ("fast", 8, 2)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([a_stage("a", "b.outputs.y"), a_stage("b", "a.outputs.y")], "is a cycle"),
        ([a_stage("a", "a.outputs.y")], "a → a is a cycle"),
        ([a_stage(), a_stage()], "duplicate name 'first'"),
        ([a_stage(variants=[a_variant(), a_variant()])], "duplicate name 'small'"),
        ([a_stage(pin={"variant": "huge"})], "pin.variant 'huge' is not one of its variants: small"),
        (
            [a_stage(pin={"operatingPoint": "ful"})],
            "pin.operatingPoint 'ful' is not an operating point of its variants: default",
        ),
        (
            [a_stage(variants=[POINTED, a_variant()], pin={"variant": "small", "operatingPoint": "fast"})],
            "pin.operatingPoint 'fast' is not an operating point of variant small: default",
        ),
        (
            [a_stage(variants=[POINTED], pin={"operatingPoint": "default"})],
            "pin.operatingPoint 'default' is not an operating point of its variants: full, fast",
        ),
        ([a_stage(pin={"batchSize": 65})], "pin.batchSize 65 is above"),
        (
            [a_stage(variants=[POINTED, a_variant()], pin={"operatingPoint": "fast", "batchSize": 16})],
            "pin.batchSize 16 is above",
        ),
        (
            [a_stage(pin={"replicas": 65})],
            "pin.replicas 65 must be between minReplicas 1 and maxReplicas 64",
        ),
        ([a_stage(minReplicas=2, pin={"replicas": 1})], "pin.replicas 1 must be between minReplicas 2"),
        ([a_stage(variants=[a_variant(accuracy=1.5)])], "variants.0.accuracy"),
        ([a_stage(minReplicas=3, maxReplicas=2)], "minReplicas 3 is above maxReplicas 2"),
        ([a_stage(outputs=[{"name": "y", "datatype": "FP32", "countedBy": "n"}])], "countedBy 'n' is not one of"),
        ([a_stage(outputs=[{"name": "y", "datatype": "FLOAT"}])], "outputs.0.datatype"),
        ([a_stage("Upper")], "stages.0.name"),
        ([a_stage("request")], "the name 'request' is reserved"),
        ([a_stage("request"), a_stage("second", "request.outputs.y")], "the name 'request' is reserved"),
    ],
)
def test_invalid_stage_is_rejected(stages, message):
    assert message in rejection(a_pipeline_document(stages))


def test_inputs_with_different_rows_are_rejected():
    mixed = a_stage(
        "mixed", inputs=[{"name": "x", "from": "request.inputs.x"}, {"name": "z", "from": "find.outputs.y"}]
    )

    assert "have different rows" in rejection(a_pipeline_document([*a_fan_out(), mixed]))


@pytest.mark.parametrize("missing", ["stages", "slo", "budget", "inputs", "outputs"])
def test_missing_field_is_named(missing):
    document = copy.deepcopy(a_pipeline_document())
    del document["spec"][missing]

    assert f"spec.{missing}: Field required" in rejection(document)


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


def test_advisory_suffix_is_reserved():
    document = a_pipeline_document()
    document["metadata"]["name"] = "digits-advisory"

    assert "metadata.name 'digits-advisory' must not end in -advisory" in rejection(document)
    assert advisory_name("digits") == "digits-advisory"
    assert len({advisory_name("d" * length) for length in (40, 43, 44, 50, 63)}) == 5
    assert all(advisory_name("d" * length).endswith("-advisory") for length in (43, 44, 63))


def test_pipeline_is_frozen():
    spec = a_pipeline().spec

    with pytest.raises(ValueError, match="frozen"):
        setattr(spec, "mode", "Paused")  # noqa: B010 - the assignment is what mypy forbids


def test_pipeline_round_trips():
    pipeline = a_pipeline(a_fan_out())

    assert InferencePipeline.model_validate(pipeline.model_dump(mode="json", by_alias=True)) == pipeline


def test_client_supplied_references_are_rejected():
    document = load_pipeline(Path("pipelines/lmm-digits/pipeline.yaml")).model_dump(mode="json", by_alias=True)
    document["spec"]["inputs"].append({"name": "places", "datatype": "BYTES", "optional": True})
    read = {"name": "references", "from": "request.inputs.places", "optional": True}
    document["spec"]["stages"][0]["inputs"].append(read)

    assert "stage answer: references are URLs" in rejection(document)
