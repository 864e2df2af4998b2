"""Stages that encode images for a stage that writes: what may read what."""

from typing import Any

import pytest

from tests.router.chats import a_chat_pipeline, a_writer
from tests.router.parted import an_encoder, parted
from trimtab_pipelines.model_spec import model_spec
from trimtab_pipelines.stages import CHAT_IMAGE_INDEX


def test_it_plans_with_images_a_chat_and_its_replicas_are_told_of_chats(tmp_path) -> None:
    stage = an_encoder()
    stage["outputs"][0]["expectedRows"] = 2.5
    pipeline = parted(stage)

    assert pipeline.spec.expected_rows == {"encode": 2.5, "text": 1.0}
    encode = pipeline.spec.stage("encode")
    spec = model_spec(pipeline, tmp_path, encode, encode.variants[0], 1.0)
    assert [read.name for read in spec.inputs] == ["images", "options", CHAT_IMAGE_INDEX]


def read_elsewhere() -> list[dict[str, Any]]:
    follower = an_encoder() | {"name": "second", "encodes": False}
    follower["inputs"] = [{"name": "x", "from": "encode.outputs.references"}]
    return [an_encoder(), follower, a_writer()]


def without_images() -> list[dict[str, Any]]:
    stage = an_encoder()
    stage["inputs"] = [{"name": "files", "from": "request.inputs.images"}]
    return [stage, a_writer()]


WRONG = {
    "another output": ([an_encoder() | {"outputs": [{"name": "y", "datatype": "FP32"}]}, a_writer()], "only output"),
    "another reader": (read_elsewhere(), "read by one that writes"),
    "images by another name": (without_images(), "needs an input images"),
    "of words": (
        [an_encoder() | {"inputs": [{"name": "images", "from": "request.inputs.messages"}]}, a_writer()],
        r"should be BYTES \[-1\]|must be BYTES \[-1\]",
    ),
}


@pytest.mark.parametrize(("stages", "words"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused_by_name(stages, words) -> None:
    with pytest.raises(ValueError, match=words):
        a_chat_pipeline(stages)


def test_where_images_are_kept_is_not_for_callers() -> None:
    with pytest.raises(ValueError, match="not for callers"):
        a_chat_pipeline([an_encoder(), a_writer()], outputs=[{"name": "r", "from": "encode.outputs.references"}])
