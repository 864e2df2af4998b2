"""Encoder stages: rows, inputs of replicas, and validation."""

from typing import Any

import pytest

from tests.router.chats import a_chat_pipeline, a_writer
from tests.router.disaggregated import a_disaggregated_pipeline, an_encoder
from trimtab_pipelines.model_spec import model_spec
from trimtab_pipelines.stages import CHAT_IMAGE_INDEX


def test_encoder_has_rows_per_image_and_chat_index_input(tmp_path) -> None:
    stage = an_encoder()
    stage["outputs"][0]["expectedRows"] = 2.5
    pipeline = a_disaggregated_pipeline(stage)

    assert pipeline.spec.expected_rows == {"encode": 2.5, "text": 1.0}
    encode = pipeline.spec.stage("encode")
    spec = model_spec(pipeline, tmp_path, encode, encode.variants[0], 1.0)
    assert [read.name for read in spec.inputs] == ["images", "options", CHAT_IMAGE_INDEX]


def read_elsewhere() -> list[dict[str, Any]]:
    follower = an_encoder() | {"name": "second", "role": "Predict"}
    follower["inputs"] = [{"name": "x", "from": "encode.outputs.references"}]
    return [an_encoder(), follower, a_writer()]


def without_images() -> list[dict[str, Any]]:
    stage = an_encoder()
    stage["inputs"] = [{"name": "files", "from": "request.inputs.images"}]
    return [stage, a_writer()]


WRONG = {
    "another output": ([an_encoder() | {"outputs": [{"name": "y", "datatype": "FP32"}]}, a_writer()], "only output"),
    "another reader": (read_elsewhere(), "Only a generation stage may read"),
    "images by another name": (without_images(), "requires an input images"),
    "text instead of images": (
        [an_encoder() | {"inputs": [{"name": "images", "from": "request.inputs.messages"}]}, a_writer()],
        r"to be BYTES \[-1\]",
    ),
}


@pytest.mark.parametrize(("stages", "message"), WRONG.values(), ids=WRONG)
def test_invalid_encoder_stage_is_rejected(stages, message) -> None:
    with pytest.raises(ValueError, match=message):
        a_chat_pipeline(stages)


def test_embeddings_cannot_be_pipeline_outputs() -> None:
    with pytest.raises(ValueError, match="cannot be an output of the pipeline"):
        a_chat_pipeline([an_encoder(), a_writer()], outputs=[{"name": "r", "from": "encode.outputs.references"}])
