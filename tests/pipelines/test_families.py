"""Tensors that documents omit: filled from the families that declare them, else named."""

from typing import Any

import pytest

from trimtab_pipelines.documents import DocumentError, parse
from trimtab_pipelines.spec import InferencePipeline


def a_stage(name: str, family: str, **more: Any) -> dict[str, Any]:
    variant = {"name": "v", "family": family, "storageUri": "m", "accuracy": 0.9}
    return {"name": name, "variants": [variant, {**variant, "name": "w"}], **more}


def parsed(*stages: dict[str, Any], **more: Any) -> InferencePipeline:
    spec = {"slo": {"latency": "1s"}, "budget": {"cores": 4}, "stages": [*stages], **more}
    metadata = {"name": "p"}
    document = {"apiVersion": "trimtab.dev/v1alpha1", "kind": "InferencePipeline", "metadata": metadata, "spec": spec}
    return parse(InferencePipeline, document, "pipeline.yaml")


def test_single_stage_has_the_tensors_of_its_family():
    spec = parsed(a_stage("classify", "hf/text-classification")).spec

    assert [(i.name, i.datatype, i.shape) for i in spec.inputs] == [("text", "BYTES", ())]
    assert [(o.name, o.datatype) for o in spec.stages[0].outputs] == [("label", "BYTES"), ("score", "FP32")]
    assert [(o.name, o.source) for o in spec.outputs] == [
        ("label", "classify.outputs.label"),
        ("score", "classify.outputs.score"),
    ]


def test_crops_are_cut_out_if_a_stage_reads_them():
    detect = a_stage("detect", "hf/object-detection")
    classify = a_stage("classify", "hf/image-classification", inputs=[{"name": "image", "from": "detect.outputs.crop"}])
    alone, both = parsed(detect).spec, parsed(detect, classify).spec

    assert [output.name for output in alone.stages[0].outputs] == ["objects", "label", "score", "box"]
    assert [output.name for output in both.stages[0].outputs] == ["objects", "label", "score", "box", "crop"]
    assert both.row_domains == {"detect": "request", "classify": "detect.outputs.objects"}
    assert [output.source for output in both.outputs] == ["classify.outputs.label", "classify.outputs.score"]


def test_written_tensors_are_kept():
    outputs = [{"name": "label", "datatype": "BYTES"}]
    inputs = [{"name": "text", "from": "request.inputs.words"}]
    spec = parsed(a_stage("classify", "hf/text-classification", inputs=inputs, outputs=outputs)).spec

    assert [tensor.name for tensor in spec.inputs] == ["words"]
    assert [output.name for output in spec.outputs] == ["label"]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([a_stage("only", "echo")], "stage only: inputs are missing; list them, since echo does not declare them"),
        (
            [a_stage("only", "echo", inputs=[{"name": "x", "from": "request.inputs.x"}])],
            "stage only: outputs are missing; list them, since echo does not declare them",
        ),
        (
            [
                a_stage(
                    "only",
                    "echo",
                    inputs=[{"name": "x", "from": "request.inputs.x"}],
                    outputs=[{"name": "y", "datatype": "FP32"}],
                )
            ],
            "inputs are missing; list those that the stages read from the request",
        ),
        (
            [a_stage("one", "hf/text-embedding"), a_stage("two", "hf/text-embedding")],
            "outputs: duplicate name 'embedding'",
        ),
        ([{"name": "only", "variants": []}], "spec.stages.0.variants: .* at least 1 item"),
    ],
    ids=["inputs", "outputs", "request", "names", "variants"],
)
def test_what_no_family_declares_is_named(stages, message):
    with pytest.raises(DocumentError, match=message):
        parsed(*stages)
