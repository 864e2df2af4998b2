"""Profiling inputs: recorded rows, output rows of another stage, or random rows."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from tests.builders import a_pipeline, a_stage, a_variant, an_echo_pipeline
from tests.router.chats import a_chat_pipeline
from tests.router.disaggregated import a_disaggregated_pipeline
from trimtab.commands.profile import sample_rows
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.tensors import TensorSpec
from trimtab_profiler import inputs
from trimtab_protocol import Tensor

PIPELINE = an_echo_pipeline([a_variant("a")], [a_variant("b")], annotations={"trimtab.dev/default-dimension": "5"})


def test_random_rows_of_the_request_have_its_shape() -> None:
    rows = inputs.request_rows(PIPELINE, 3)

    assert rows["request.inputs.x"].shape == (3, 5)
    assert rows["request.inputs.x"].dtype == np.float32
    assert np.array_equal(rows["request.inputs.x"], inputs.request_rows(PIPELINE, 3)["request.inputs.x"])


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        ({"trimtab.dev/payloads": "cats"}, "known payloads:"),
        ({"trimtab.dev/default-dimension": "-1"}, "'-1' must be a positive integer"),
    ],
)
def test_invalid_annotations_are_rejected(annotations, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        inputs.request_rows(an_echo_pipeline([a_variant("a")], annotations=annotations), 1)


def test_drawn_rows_are_what_images_and_tokenizers_produce() -> None:
    image = TensorSpec(name="image", datatype="UINT8", shape=(8, 8, 3))
    mask = TensorSpec(name="attention_mask", datatype="INT64", shape=(5,))
    assert inputs.random_rows(image, 9, 5).max() > 200
    assert inputs.random_rows(mask, 2, 5).tolist() == [[1] * 5] * 2
    assert inputs.random_rows(mask.replace(name="ids"), 9, 5).max() < 128


def test_rows_of_samples_have_their_most_frequent_shape(tmp_path: Path) -> None:
    lines = [{"inputs": {"x": [float(n)] * (3 if n % 3 else 2)}} for n in range(9)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (rows,) = sample_rows(LabelledPayloads(PIPELINE, str(tmp_path), labels="Optional")).items()
    assert rows[0] == "request.inputs.x"
    assert sorted(rows[1].tolist()) == [[n] * 3 for n in (1, 2, 4, 5, 7, 8)]


def test_stage_gets_outputs_of_the_previous_stage() -> None:
    answers = [(Tensor.of("y", np.full((2, 7), n, np.float32)),) for n in (1, 2)]
    known = inputs.concatenate_outputs(PIPELINE.spec.stage("first"), answers)

    rows = inputs.stage_rows(PIPELINE, PIPELINE.spec.stage("second"), known, 3)
    assert rows["x"].tolist() == [[1] * 7, [1] * 7, [2] * 7, [2] * 7]


@pytest.mark.parametrize("known", [{}, {"first.outputs.y": np.empty((0, 7), np.float32)}])
def test_stage_without_known_rows_gets_random_ones(known) -> None:
    rows = inputs.stage_rows(PIPELINE, PIPELINE.spec.stage("second"), known, 3)

    assert rows["x"].shape == (3, 5)


def test_stage_gets_no_optional_inputs_that_samples_lack() -> None:
    pipeline = a_chat_pipeline()
    known = {"request.inputs.messages": np.array([b"[]"], dtype=object)}

    assert inputs.stage_rows(pipeline, pipeline.spec.stage("text"), known, 2).keys() == {"messages"}


def test_stage_after_a_detector_that_finds_nothing_gets_images() -> None:
    pipeline = load_pipeline(Path(__file__).parents[2] / "pipelines" / "video" / "pipeline.yaml")
    nothing = {"detect.outputs.crop": np.empty(0, dtype=object)}

    rows = inputs.stage_rows(pipeline, pipeline.spec.stage("classify"), nothing, 2)
    assert [Pillow.open(io.BytesIO(row)).format for row in rows["image"]] == ["JPEG"] * 2


def test_batches_cycle_over_few_rows() -> None:
    (tensor,) = inputs.batch({"y": np.arange(3)}, size=5, offset=2, datatypes={"y": "INT64"})

    assert tensor.array.tolist() == [2, 0, 1, 2, 0]


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT64", "FP16", "FP64", "BYTES"])
def test_random_rows_of_every_datatype_are_encodable(datatype: str) -> None:
    rows = inputs.random_rows(TensorSpec(name="x", datatype=datatype, shape=(2, -1)), count=4, any_size=3)

    assert rows.shape == (4, 2, 3)
    assert Tensor.of("x", rows).datatype == datatype


def test_chats_are_questions_about_one_page_without_options() -> None:
    tensors = [{"name": name, "datatype": "BYTES"} for name in ("messages", "images", "options")]
    pipeline = a_pipeline([a_stage(source="request.inputs.messages")], inputs=tensors)
    pipeline.metadata.annotations["trimtab.dev/payloads"] = "lmm-digits"
    rows = inputs.request_rows(pipeline, 3)

    assert rows["request.inputs.images"].shape == (3, 1)
    assert [json.loads(text)[0]["content"][0]["type"] for text in rows["request.inputs.messages"]] == ["image"] * 3
    assert rows["request.inputs.options"].tolist() == [b"{}"] * 3


@pytest.mark.parametrize("name", ["llava-onevision", "llama-vision"])
def test_chats_without_payloads_are_about_noise_images(name: str) -> None:
    pipeline = load_pipeline(Path(__file__).parents[2] / "pipelines" / name / "pipeline.yaml")

    rows = inputs.request_rows(pipeline, 2)

    images = [Pillow.open(io.BytesIO(file)).size for (file,) in rows["request.inputs.images"]]
    assert images == [(inputs.PICTURE_PX, inputs.PICTURE_PX)] * 2
    assert [json.loads(text)[0]["content"][0]["type"] for text in rows["request.inputs.messages"]] == ["image"] * 2
    assert json.loads(rows["request.inputs.options"][0]) == {"max_tokens": inputs.ANSWER_TOKENS}


def test_encoder_outputs_become_blank_image_references() -> None:
    encode = a_disaggregated_pipeline().spec.stage("encode")
    references = np.array([b'{"rows": 4, "digest": "d"}', b'{"rows": 9}'], dtype=object)

    rows = inputs.concatenate_outputs(encode, [(Tensor.of("references", references),)])["encode.outputs.references"]
    assert [json.loads(row) for row in rows] == [[{"url": "blank:", "rows": count}] for count in (4, 9)]
