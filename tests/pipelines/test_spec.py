"""Pipelines and their stages: what they imply, and invalid ones, whose messages name the field."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.builders import a_pipeline, a_pipeline_document, a_stage, a_variant
from tests.pipelines.invalid_documents import INVALID, POINTED, Invalid
from tests.router.chats import a_chat_pipeline, a_writer
from tests.router.disaggregated import (
    PULLS,
    WHOLE,
    a_choosing_pipeline,
    a_choosing_writer,
    a_disaggregated_pipeline,
    an_encoder,
    laid_out,
)
from tests.router.engines import a_served
from trimtab_pipelines.documents import DocumentError, load_pipeline, parse, validate_plan
from trimtab_pipelines.kubernetes_names import advisory_name
from trimtab_pipelines.model_spec import model_spec
from trimtab_pipelines.plan import idle_stages
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import CHAT_IMAGE_INDEX
from trimtab_pipelines.variants import Container


def rejection(document):
    with pytest.raises(DocumentError) as error:
        parse(InferencePipeline, document, "pipeline.yaml")
    return str(error.value)


@pytest.mark.parametrize(
    ("padding", "datatype", "shape"),
    [(-1, "UINT8", [-1]), (0.5, "INT64", [-1]), (0, "BYTES", [-1]), (0, "FP32", [4]), (300, "UINT8", [-1])],
)
def test_padding_that_its_tensor_cannot_have_is_rejected(padding, datatype, shape):
    document = a_pipeline_document([a_stage("read")], inputs=[{"name": "x", "datatype": datatype, "shape": shape}])
    (read,) = document["spec"]["stages"][0]["inputs"]
    read["padding"] = padding

    assert f"padding {padding} fits no {read['from']} of {datatype} {shape}" in rejection(document)


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


POINTS = [{"name": "fast", "accuracy": 0.8}, {"name": "slow", "accuracy": 0.9}]
OTHERS = {"name": "others", "datatype": "BYTES", "shape": [-1], "optional": True}


def test_encoder_has_rows_per_image_and_chat_index_input(tmp_path) -> None:
    stage = an_encoder()
    stage["outputs"][0]["expectedRows"] = 2.5
    pipeline = a_disaggregated_pipeline(stage)

    assert pipeline.spec.expected_rows == {"encode": 2.5, "text": 1.0}
    encode = pipeline.spec.stage("encode")
    spec = model_spec(pipeline, tmp_path, encode, encode.variants[0], 1.0)
    assert [read.name for read in spec.inputs] == ["images", "options", CHAT_IMAGE_INDEX]


def test_each_variant_reads_its_placements_inputs(tmp_path):
    pipeline = a_choosing_pipeline()
    text = pipeline.spec.stage("text")

    def read(name):
        return [each.name for each in model_spec(pipeline, tmp_path, text, text.variant(name), 1.0).inputs]

    assert read(PULLS) == ["messages", "options", "references"]
    assert read(WHOLE) == ["messages", "options", "images"]
    assert pipeline.spec.encoders == {"text": "encode"}


def test_plan_idles_encoder_only_for_colocated_variant():
    pipeline = a_choosing_pipeline()
    whole, apart = (laid_out(pipeline, apart=apart) for apart in (False, True))

    assert idle_stages(validate_plan(whole, pipeline), pipeline.spec) == {"encode"}
    assert idle_stages(validate_plan(apart, pipeline), pipeline.spec) == frozenset()
    starving = apart.model_copy(deep=True)
    starving.spec.stages[0].__dict__["replicas"] = 0
    with pytest.raises(DocumentError, match="encode has 0 replicas"):
        validate_plan(starving, pipeline)
    starving.spec.stages[1].__dict__["variant"] = "gone"
    with pytest.raises(DocumentError, match="no variant 'gone'"):
        validate_plan(starving, pipeline)


def test_budget_excludes_optional_encoders():
    core = {"cpu": "1"}
    encoder = an_encoder() | {"variants": [a_variant(resources=core)]}
    writer = a_choosing_writer() | {
        "variants": [a_variant(PULLS, resources=core), a_variant(WHOLE, encoder="Colocated")]
    }

    assert a_chat_pipeline([encoder, writer], budget={"cores": "1"}).spec.budget.cores == 1


def test_openai_container_may_be_a_colocated_variant():
    served = a_served(WHOLE) | {"encoder": "Colocated"}
    writer = a_choosing_writer() | {"variants": [a_variant(PULLS), served]}
    stage = a_chat_pipeline([an_encoder(), writer]).spec.stage("text")

    assert [one.name for one in stage.variants if one.forwards_chats] == [WHOLE]
    assert stage.excluded_input(WHOLE) == "references"


@pytest.mark.parametrize(
    ("fields", "protocol", "path"),
    [
        ({"engine": "vllm"}, "OpenAI", "/health"),
        ({"engine": "sglang", "readyPath": "/v2/health/ready"}, "OpenAI", "/health"),
        ({"engine": "openai", "readyPath": "/ready"}, "OpenAI", "/ready"),
        ({"engine": "triton"}, "OpenInference", "/v2/health/ready"),
    ],
)
def test_engine_sets_protocol_and_ready_path(fields: dict[str, str], protocol: str, path: str) -> None:
    container = Container.model_validate({"image": "i", **fields})

    assert (container.protocol, container.ready_path) == (protocol, path)
    assert Container.model_validate(container.model_dump(by_alias=True)) == container


def test_default_container_protocol_is_omitted():
    variant = a_variant(family="", storageUri="", container={"image": "triton:1"})
    (stage,) = a_pipeline([a_stage(variants=[variant])]).spec.stages
    assert "protocol" not in stage.variants[0].model_dump()["container"]


def test_embeddings_cannot_be_pipeline_outputs() -> None:
    with pytest.raises(ValueError, match="cannot be an output of the pipeline"):
        a_chat_pipeline([an_encoder(), a_writer()], outputs=[{"name": "r", "from": "encode.outputs.references"}])


def with_input(stage: dict[str, Any], index: int, **fields: Any) -> dict[str, Any]:
    """A stage that reads one of its inputs differently."""
    stage["inputs"][index] |= fields
    return stage


WRONG = {
    "no encoder stage": ([a_writer(variants=[a_variant(encoder="Colocated")])], "optional inputs images"),
    "no generation stage": (
        [an_encoder() | {"variants": [a_variant(encoder="Colocated")]}, a_writer()],
        "role Generate",
    ),
    "required images": ([an_encoder(), with_input(a_choosing_writer(), 2, optional=False)], "optional inputs images"),
    "another reader of the encoder": (
        [an_encoder(), a_choosing_writer(), a_choosing_writer() | {"name": "second", "variants": [a_variant()]}],
        "stage second reads it too",
    ),
    "other images": (
        [an_encoder(), with_input(a_choosing_writer(), 2, **{"from": "request.inputs.others"})],
        "read the same images",
    ),
    "another reader": (
        [
            an_encoder(),
            an_encoder()
            | {"name": "second", "role": "Predict", "inputs": [{"name": "x", "from": "encode.outputs.references"}]},
            a_writer(),
        ],
        "Only a generation stage may read",
    ),
    "images by another name": (
        [an_encoder() | {"inputs": [{"name": "files", "from": "request.inputs.images"}]}, a_writer()],
        "requires an input images",
    ),
    "text instead of images": (
        [an_encoder() | {"inputs": [{"name": "images", "from": "request.inputs.messages"}]}, a_writer()],
        r"to be BYTES \[-1\]",
    ),
    "container with a disaggregated encoder": (
        [an_encoder(), a_choosing_writer() | {"variants": [a_served(PULLS), a_variant(WHOLE, encoder="Colocated")]}],
        f"variant {PULLS} .* its own encoder",
    ),
    "container without messages": (
        [with_input(a_writer(variants=[a_served()]), 0, name="said")],
        "requires an input messages",
    ),
    "container with several operating points": (
        [a_writer(variants=[a_served() | {"operatingPoints": POINTS}])],
        "one operating point",
    ),
    "container without ready path": ([a_writer(variants=[a_served(readyPath="/v2/health/ready")])], "set readyPath"),
    "protocol of another engine": ([a_writer(variants=[a_served(engine="triton")])], "triton has protocol OpenInf"),
    "unknown protocol": ([a_writer(variants=[a_served(protocol="Ollama")])], "OpenInference.*OpenAI"),
    "adapters of tensors": (
        [a_stage(variants=[a_served(protocol="OpenInference", adapters={"sql": "lora"})])],
        "adapters: they require protocol OpenAI",
    ),
    "adapter of one variant alone": (
        [a_writer(variants=[a_served("small", adapters={"sql": "lora"}), a_served("large")])],
        "variant large has no adapter for task 'sql'",
    ),
}


@pytest.mark.parametrize(("stages", "message"), WRONG.values(), ids=WRONG)
def test_invalid_chat_stage_is_rejected(stages: list[dict[str, Any]], message: str):
    inputs = [*a_choosing_pipeline().spec.model_dump(by_alias=True)["inputs"], OTHERS]
    with pytest.raises(ValueError, match=message):
        a_chat_pipeline(stages, inputs=inputs)


def test_endpoints_bound_the_replicas_of_their_variant() -> None:
    container = {"endpoints": ["http://a:1", "https://b:2"], "readyPath": "/health"}
    stage = a_pipeline([a_stage(variants=[a_variant(family="", storageUri="", container=container)])]).spec.stages[0]
    assert stage.max_replicas_of(stage.variants[0]) == 2
    assert stage.max_replicas_of(a_pipeline([a_stage()]).spec.stages[0].variants[0]) == 64


@pytest.mark.parametrize("url", ["10.0.0.1:8000", "http://a/b:1", "http://user@a:1", "file:///etc:1"])
def test_endpoint_is_an_address(url: str) -> None:
    with pytest.raises(ValueError, match="endpoints"):
        a_pipeline([a_stage(variants=[a_variant(family="", storageUri="", container={"endpoints": [url]})])])


def test_copy_with_other_stages_has_their_order():
    pipeline = a_pipeline(2)
    assert [stage.name for stage in pipeline.spec.ordered_stages] == ["stage-0", "stage-1"]

    shorter = pipeline.with_spec(stages=pipeline.spec.stages[:1])
    assert shorter.spec.ordered_stages == shorter.spec.stages
